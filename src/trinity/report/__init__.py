"""Reports: a plan, its plots and replays on one page of HTML; plots of plans and of what was served.

``report.save("plan.html", plan)`` writes the page; ``trinity.report.plots`` draws.
"""

from trinity.report.page import html as html
from trinity.report.page import save as save
