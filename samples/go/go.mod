module rank

go 1.24

require pagoda v0.0.0

replace pagoda => ../../bindings/go
