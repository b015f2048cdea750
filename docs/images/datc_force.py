"""Draws datc_force.svg: force, displacement and work in the logit space of three tokens.

python docs/images/datc_force.py
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

# Logit space modulo a constant: the plane orthogonal to (1, 1, 1), one axis a token.
AXES = np.array([[0.0, 1.0], [-np.sqrt(3) / 2, -0.5], [np.sqrt(3) / 2, -0.5]])
P = np.array([0.5, 0.3, 0.2])
U = np.array([0.1, 1.0, -0.4])

figure = Figure(figsize=(8.4, 3.4), layout="constrained")
force = P * (U - P @ U)
for axes, token in zip(figure.subplots(1, 3), range(3), strict=True):
    k = np.eye(3)[token] - P
    work = force @ k
    for name, direction in zip("abc", AXES, strict=True):
        axes.plot(*np.stack([0 * direction, direction]).T, color="#cccccc", linewidth=1, zorder=0)
        axes.annotate(name, direction * 1.1, ha="center", va="center", color="#777777")
    for vector, color, label in (
        (4 * force @ AXES, "#b3541e", "reward force G (x 4)"),
        (k @ AXES, "#1f4e79", "update direction k"),
    ):
        axes.annotate(
            "", vector, (0, 0), arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 2}
        )
        axes.plot([], [], color=color, linewidth=2, label=label)
    axes.set_title(f"sampled {'abc'[token]}: work {work:+.3f}", fontsize=10)
    axes.set_aspect("equal")
    axes.set(xlim=(-1.3, 1.3), ylim=(-0.9, 1.3), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
figure.axes[1].legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, -0.2))
figure.savefig(Path(__file__).with_suffix(".svg"))
