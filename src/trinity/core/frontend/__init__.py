"""The front end's core: routes requests to instances, orders their tokens, and recovers them when an instance dies."""

from trinity.core.frontend.frontend_core import FrontendCore as FrontendCore
from trinity.core.frontend.frontend_core import FrontendOptions as FrontendOptions
from trinity.core.frontend.messages import Abort as Abort
from trinity.core.frontend.messages import Deliver as Deliver
from trinity.core.frontend.messages import End as End
