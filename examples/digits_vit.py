"""Train a small Vision Transformer to classify handwritten digits of 8x8 pixels, in half a minute on a CPU.

    pip install '.[demo]'
    python examples/digits_vit.py

Each image becomes 16 patches of 2x2 pixels. Any bidirectional attention mechanism can read the patches: set
ATTENTION to another name to try one.
"""

import torch
from sklearn.datasets import load_digits

from unrolled.models import ViT, ViTConfig

ATTENTION = "softmax"
EPOCHS = 15

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1  # levels 0..16 to -1..1
labels = torch.tensor(labels)
order = torch.randperm(len(labels))
train, test = order[:1500], order[1500:]

config = ViTConfig(
    image_size=[8, 8], patch_size=[2, 2], channels=1, n_classes=10, d_model=64, n_layers=2, n_heads=4,
    attention=ATTENTION,
)  # fmt: skip
model = ViT(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=EPOCHS * 30)
print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {config.n_tokens} tokens per image")

for epoch in range(1, EPOCHS + 1):
    for rows in train[torch.randperm(len(train))].split(50):
        loss = model.loss(images[rows], labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.inference_mode():
        accuracy = (model(images[test]).argmax(-1) == labels[test]).float().mean().item()
    print(f"epoch {epoch:2}   loss {loss.item():.3f}   {accuracy:.1%} of {len(test)} unseen digits right")

assert accuracy > 0.9
