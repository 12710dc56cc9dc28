"""A small trained LLaVA that comes with trinity, and its world: pictures of shapes, and questions about them.

::

    from trinity.demo import draw_shapes

    picture = draw_shapes({"top left": "red circle", "bottom right": "blue square"})
    with trinity.SyncPipeline("shapes", placement="1E1P1D") as pipe:
        print(pipe.chat("Where is the blue square?", images=[picture]).text)

It has learned from drawn pictures alone (``tools/demo_model`` of the repository trains another one) and knows six
kinds of questions: "How many shapes are there?", "What colour is the circle?", "Which shape is red?", "What is at the
top left?", "Where is the red circle?", "What is in this picture?". ``shapes/ORIGIN.md`` says how often it is right.
"""

from __future__ import annotations

from pathlib import Path

from trinity.demo.pictures import draw_shapes as draw_shapes

SHAPES_MODEL = Path(__file__).parent / "shapes"
"""Directory of the checkpoint "shapes", in transformers' format: 1.2 M parameters in bfloat16, Apache-2.0."""
