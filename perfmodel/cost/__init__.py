from perfmodel.cost._collectives import CollectiveModel as CollectiveModel
from perfmodel.cost._events import EventTimes as EventTimes
