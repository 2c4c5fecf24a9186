"""Parses a model's text into reasoning, tool calls and content, without the engine."""

from .choice import Parsers as Parsers
from .deltas import Call as Call
from .deltas import Delta as Delta
from .deltas import Message as Message
from .deltas import ToolDelta as ToolDelta
from .deltas import joined as joined
from .forced import after_reasoning as after_reasoning
from .forced import structural_tag as structural_tag
from .output import OutputParser as OutputParser
