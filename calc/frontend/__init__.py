"""Hugging Face directory → `ModelSpec` and prefill/decode graphs, weights as lazy references.

The only package that may import torch or transformers; importing `calc.frontend` itself imports nothing.

The table of contents, a module per line:

- `hub.resolve`: a path or hub id → a directory.
- `checkpoint.Checkpoint`: the safetensors headers; `config`, `tokenizer`: the JSON files; `loaded.load`: that all of
  them describe one model; `spec.open_model`: that and the `ModelSpec`, for every later stage.
- `build`, `attention`, `norms`, `rope`, `experts`, `ops`: the model without data, and the seams at which its parts are
  replaced; `trace`, `translate`: a static shape → the raw graph.
- `cleanup`, `mapping`, `link`, `functions`: the tidy graph, whose weights refer to the checkpoint.
- `export.export`: all of that; `save.save`: files that ONNX Runtime loads; `reference.reference`: what transformers
  itself answers.
"""
