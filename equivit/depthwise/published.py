"""The blocks and heads of lowest Sigma that the authors publish for DINOv2's ViT-L/14, fine-tuned on COCO.

    model = replacement.replace(model, dict.fromkeys(published.BLOCKS))
    model = replacement.replace(model, published.HEADS)

Source: github.com/cscribano/DWConv_VFM, in whose configs both are lists.
"""

BLOCKS = (8, 6, 4, 9, 7, 5, 10, 1, 3, 11, 13, 12)  # 12 of 24, lowest Sigma first

HEADS: dict[int, tuple[int, ...]] = {  # 192 of 384, by block
    0: (3, 5, 10, 11, 12, 15),
    1: (0, 2, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15),
    2: (0, 2, 3, 6, 7, 8, 9, 12),
    3: (0, 1, 4, 6, 8, 9, 10, 12, 13, 15),
    4: (0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
    5: (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
    6: (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14),
    7: (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
    8: (0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14),
    9: (0, 1, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15),
    10: (0, 2, 5, 6, 7, 8, 9, 11, 12, 13, 15),
    11: (0, 1, 3, 4, 5, 7, 8, 10, 14, 15),
    12: (0, 1, 5, 7, 8, 10, 11, 13, 14),
    13: (0, 1, 2, 3, 7, 8, 10, 12, 13, 15),
    14: (1, 4, 6, 7, 8, 9, 11, 15),
    15: (2, 3, 5, 7, 9, 10, 11, 13, 15),
    16: (3, 4, 10),
    17: (5, 8, 9, 10),
    18: (9,),
    19: (6,),
}
