"""memopt in trainers and compilers. Each module needs the package that it integrates with."""
