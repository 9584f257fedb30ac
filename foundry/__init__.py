"""Small real models for the tests: data generators, training, measurement. Nothing of the product depends on it."""
