"""Replace the attention of a pretrained ViT by depthwise convolution.

`selection` scores blocks and heads by Sigma, `published` lists the authors' choice, `replacement` replaces them, `fit`
computes taps from the attention, and `gates` lets training choose.  The modules are in `layers/depthwise.py`.

Source: "Accelerating Vision Transformers with Drop-in Depthwise Convolution".
"""
