"""MobileNetV4: the model, inverted bottlenecks, and multi-query attention."""
