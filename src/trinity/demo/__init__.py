"""A small LLaVA that learns from drawn pictures, and all of its world: pictures of shapes, questions, its training.

``trinity train-demo DIR`` trains one. It then knows six kinds of questions: "How many shapes are there?", "What
colour is the circle?", "Which shape is red?", "What is at the top left?", "Where is the red circle?", "What is in this
picture?".
"""

from __future__ import annotations

from trinity.demo.pictures import draw_shapes as draw_shapes
