"""Plain, octic, flip and Jumbo ViTs: the models, their configurations, parts and names."""
