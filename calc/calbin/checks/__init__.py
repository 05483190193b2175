"""What a reader must refuse, by topic. Each check adds to the context's report; `calc.calbin.validate` orders them."""
