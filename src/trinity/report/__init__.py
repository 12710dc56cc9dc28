"""Reports of plans as one page of HTML, and plots of plans, replays and served requests.

``report.save_report("plan.html", plan)`` writes the page; ``trinity.report.plots`` draws.
"""

from trinity.report.page import render_html as render_html
from trinity.report.page import save_report as save_report
