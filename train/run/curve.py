"""Acceptance length against training: a saturating power law, fitted to measured drafters, with its error.

    tau(x) = top - sum over amounts i of a_i * x_i ** -p_i

Amounts are, for example, response tokens seen in training and distinct response tokens, or GPU minutes. For fixed
exponents the law is linear, so the other parameters have a closed form. Exponents come from a grid, each weighted by
its likelihood; a prediction is the weighted mean, and its error includes the spread over the grid.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dflash_toolkit.config import UserError

EXPONENTS = np.geomspace(0.1, 2.0, 40)  # candidates for each p_i
LEAST_MISFIT = 1e-12  # of a fit that meets every point

Array = NDArray[np.float64]


class Point(NamedTuple):
    """A measured drafter."""

    amounts: tuple[float, ...]  # all > 0, the same ones in all points
    tau: float
    error: float | None = None  # standard error of tau, if known


class Value(NamedTuple):
    """A predicted acceptance length, or a difference of two, and its standard error."""

    tau: float
    error: float


@dataclass(frozen=True, slots=True)
class Curve:
    """A fitted law. Arrays have a row for each combination of exponents."""

    points: tuple[Point, ...]
    varied: tuple[int, ...]  # indices of the amounts that differ between points; the others do not count
    scale: Array  # [I] geometric means of these amounts
    exponents: Array  # [C, I]
    weights: Array  # [C], their sum is 1
    parameters: Array  # [C, 1 + I]: top, then -a_i in units of `scale`
    covariance: Array  # [C, 1 + I, 1 + I]

    def at(self, amounts: Sequence[float]) -> Value:
        """Returns the acceptance length after training with these amounts."""
        found = self._value(self._terms(amounts))
        return found._replace(tau=max(1.0, found.tau))

    def gain(self, before: Sequence[float], after: Sequence[float]) -> Value:
        """Returns by how much the acceptance length rises from one training to another."""
        return self._value(self._terms(after) - self._terms(before))

    def _terms(self, amounts: Sequence[float]) -> Array:
        ratios = np.array([amounts[i] for i in self.varied]) / self.scale
        return np.concatenate([np.ones((len(self.exponents), 1)), ratios**-self.exponents], axis=1)

    def _value(self, terms: Array) -> Value:
        means = (terms * self.parameters).sum(1)
        variances = np.einsum("ci,cij,cj->c", terms, self.covariance, terms)
        mean = float(self.weights @ means)
        return Value(mean, float(np.sqrt(self.weights @ (variances + (means - mean) ** 2))))


def fit(points: Sequence[Point]) -> Curve:
    """Fits the law to points, weighted by their errors if all are known.

    Otherwise the error follows from the points' scatter around the law, as it does if it exceeds the given errors.

    Raises:
        UserError: fewer points than parameters, or no amount raises the acceptance length.
    """
    amounts = np.array([point.amounts for point in points], float)
    varied = tuple(i for i, of_one in enumerate(amounts.T) if len(set(of_one)) > 1)
    known = all(point.error for point in points)
    count, parameters = len(points), 1 + 2 * max(1, len(varied))
    needed = parameters + (not known)
    if count < needed or not varied:
        raise UserError(
            f"{count} points with {len(varied)} amounts that differ are too few for a curve with {parameters} "
            f"parameters; measure at least {needed}"
        )
    scale = np.exp(np.log(amounts[:, varied]).mean(0))
    exponents = np.array(list(itertools.product(EXPONENTS, repeat=len(varied))))
    terms = (amounts[:, varied] / scale) ** -exponents[:, None]  # [C, N, I]
    terms = np.concatenate([np.ones((*terms.shape[:2], 1)), terms], axis=2)
    tau = np.array([point.tau for point in points])
    error = np.array([point.error for point in points], float) if known else np.ones(count)
    weighted = terms / error[:, None]
    covariance = np.linalg.pinv(weighted.transpose(0, 2, 1) @ weighted, hermitian=True)
    found = np.einsum("cij,cnj,n->ci", covariance, weighted, tau / error)
    misfit = (((tau - np.einsum("cni,ci->cn", terms, found)) / error) ** 2).sum(1)
    rises = (found[:, 1:] < 0).all(1)
    if not rises.any():
        raise UserError(f"acceptance does not rise with training over these {count} points, so no curve fits them")
    exponents, found, covariance, misfit = (each[rises] for each in (exponents, found, covariance, misfit))
    if known:
        variance = np.full(len(misfit), max(1.0, misfit.min() / max(1, count - parameters)))
        weights = np.exp((misfit.min() - misfit) / (2 * variance))
    else:  # the posterior of an unknown variance is an inverse gamma distribution, for each combination of exponents
        misfit, free = np.maximum(misfit, LEAST_MISFIT), count - found.shape[1]
        variance = misfit / max(1, free - 2)
        weights = (misfit / misfit.min()) ** (-free / 2)
    return Curve(
        tuple(points), varied, scale, exponents, weights / weights.sum(), found, variance[:, None, None] * covariance
    )
