#!/usr/bin/env bash
# From a model to a verified artefact, with a reason when it fails: build.sh MODEL OUT_DIR [calc compile's options]
set -uo pipefail
model=${1:?MODEL} out=${2:?OUT_DIR}
shift 2
mkdir -p "$out"

step() { # NAME COMMAND...: run, keep the JSON, and on failure say what the exit code means
  local name=$1 code=0
  shift
  "$@" --format json >"$out/$name.json" 2>"$out/$name.error.json" || code=$?
  case $code in
    0) rm "$out/$name.error.json"; return ;;
    1) echo "$name: findings, see $out/$name.json and $out/$name.error.json" ;;
    3 | 4) echo "$name: the input cannot be used" ;;
    5 | 6) echo "$name: this machine or the target is too small" ;;
    *) echo "$name: exit code $code" ;;
  esac >&2
  cat "$out/$name.error.json" >&2
  exit "$code"
}

step inventory calc inventory "$model"
step compile calc compile "$model" -o "$out/model.calbin" "$@"
step verify calc verify "$out/model.calbin" --strict --junit "$out/report.xml"
step bench calc bench "$out/model.calbin"
echo "$out/model.calbin"
