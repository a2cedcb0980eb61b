"""Simulated physics: springs, charges and oscillators (Kipf et al. 2018, appendix B); gravity, balls in a box and a
string (Battaglia et al. 2016, section 4). The seed decides every byte.

Computed in float64 and stored in float32, all simulations at once, in blocks that fit the cache; each simulation is
bit-equal to its computation alone.
"""

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Self

import torch
from torch import Tensor

from structconv.shapes import check_positive

__all__ = ["SYSTEMS", "Balls", "Charges", "Gravity", "Oscillators", "Simulations", "Springs", "String", "System"]

#: Simulations in a block, and the multiple it is padded to, so that the same vector instructions compute each.
_BLOCK, _LANES = 512, 32
Report = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Simulations:
    """S simulations of N bodies at T times.

    Attributes:
        states: (S, T, N, C), float32: position and velocity in the plane, C = 4; of `Oscillators` C = 3.
        couplings: (S, N, N), float32: the strength of the action of body m on body n; 0 for none.
        properties: (S, N, A), float32: constant properties of each body, mass first.
        interval: the time between two states.

    Example:

        >>> from structconv_systems.data.physics import Springs
        >>> simulations = Springs(bodies=3).simulate(4, times=10, seed=0)
        >>> simulations.states.shape, simulations.couplings.shape, simulations.interval
        (torch.Size([4, 10, 3, 4]), torch.Size([4, 3, 3]), 0.1)
    """

    states: Tensor
    couplings: Tensor
    properties: Tensor
    interval: float

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, chosen: slice | Tensor) -> Self:
        return replace(self, states=self.states[chosen], couplings=self.couplings[chosen],
                       properties=self.properties[chosen])

    def __repr__(self) -> str:
        count, times, bodies, _ = self.states.shape
        return f"Simulations({count} of {bodies} bodies, {times} times, {self.interval:g} apart)"


@dataclass(frozen=True, kw_only=True)
class System(abc.ABC):
    """Laws of motion.

    Args:
        bodies: N.
        step: step of the integrator, in the system's unit of time.
        every: number of steps between two stored states.

    Raises:
        ConfigError: the number of bodies or steps is below 1.

    Example:

        >>> from structconv_systems.data.physics import Springs, System
        >>> issubclass(Springs, System), Springs(bodies=3).simulate(2, times=5, seed=0).states.shape
        (True, torch.Size([2, 5, 3, 4]))
    """

    bodies: int = 5
    step: float = 0.001
    every: int = 1

    def __post_init__(self) -> None:
        for name in ("bodies", "every"):
            check_positive(type(self).__name__, name, getattr(self, name))

    @property
    def interval(self) -> float:
        """The time between two stored states."""
        return self.step * self.every

    @abc.abstractmethod
    def start(self, simulations: int, generator: torch.Generator) -> Simulations:
        """Draw the initial states."""

    def _begin(self, states: Tensor, couplings: Tensor, properties: Tensor) -> Simulations:
        """Return simulations of the initial states (S, N, C) alone."""
        return Simulations(states=states.unsqueeze(1), couplings=couplings, properties=properties,
                           interval=self.interval)

    @abc.abstractmethod
    def states(self, start: Simulations, times: int) -> Tensor:
        """Return the states (S, T, N, C), float32, from the last time of `start` on."""

    def simulate(self, simulations: int, times: int, *, seed: int, progress: Report = lambda done, all: None
                 ) -> Simulations:
        """Return S simulations of T times, drawn from `seed`; calls `progress(done, total)`."""
        start = self.start(check_positive("simulate", "simulations", simulations), torch.Generator().manual_seed(seed))
        return self.run(start, times, progress)

    @torch.no_grad()
    def run(self, start: Simulations, times: int, progress: Report = lambda done, all: None) -> Simulations:
        """Continue each simulation for T times from its last state, which is the first of the result."""
        check_positive("run", "times", times)
        blocks = []
        for first in range(0, len(start), _BLOCK):
            block = start[first:first + _BLOCK]
            lanes = torch.arange(-(-len(block) // _LANES) * _LANES).clamp(max=len(block) - 1)
            blocks.append(self.states(block[lanes], times)[:len(block)])
            progress(min(first + _BLOCK, len(start)), len(start))
        return replace(start, states=torch.cat(blocks))


@dataclass(frozen=True, kw_only=True)
class Newtonian(System):
    """Bodies in the plane, by leapfrog: half a kick, then drifts and kicks in turn, half a kick (velocity Verlet)."""

    def states(self, start: Simulations, times: int) -> Tensor:
        """The bodies of a simulation lie apart in memory, the same body in all simulations side by side."""
        couplings, properties = (table.double().permute(1, 2, 0).contiguous()
                                 for table in (start.couplings, start.properties.mT))
        recorded = [start.states[:, -1].double().permute(2, 1, 0).contiguous()]
        for _ in range(times - 1):
            recorded.append(self.evolve(recorded[-1], couplings, properties))
        return torch.stack(recorded).float().permute(3, 0, 2, 1).contiguous()

    def evolve(self, state: Tensor, couplings: Tensor, properties: Tensor) -> Tensor:
        """(4, N, S) -> the same, `every` steps later; couplings (N, N, S), properties (A, N, S)."""
        x, v = (part.clone() for part in state.chunk(2))
        v.add_(self.acceleration(x, couplings, properties), alpha=self.step / 2)
        for left in range(self.every, 0, -1):
            x.add_(v, alpha=self.step)
            self.collide(x, v, properties)
            v.add_(self.acceleration(x, couplings, properties), alpha=self.step if left > 1 else self.step / 2)
        return torch.cat([x, v])

    @abc.abstractmethod
    def acceleration(self, x: Tensor, couplings: Tensor, properties: Tensor) -> Tensor:
        """Return the acceleration of bodies at x (2, N, S), in the same shape."""

    @abc.abstractmethod
    def potential(self, positions: Tensor, simulations: Simulations) -> Tensor:
        """(S, T) of positions (S, T, N, 2), float64."""

    def collide(self, x: Tensor, v: Tensor, properties: Tensor) -> None:
        """Change x and v in place where something is hit; nothing is, here."""

    def energy(self, simulations: Simulations) -> Tensor:
        positions, velocities = simulations.states.double().chunk(2, -1)
        masses = simulations.properties[:, None, :, 0].double()
        kinetic = (masses * velocities.square().sum(-1)).sum(-1) / 2
        return kinetic + self.potential(positions, simulations)


@dataclass(frozen=True, kw_only=True)
class Boxed(Newtonian):
    """Bodies of mass 1 in a box, from whose walls they bounce; without friction and without units.

    Args:
        box: half its side.
        spread: standard deviation of the first positions, around the middle. speed: of every body in the beginning.
    """

    every: int = 100
    box: float = 5.0
    spread: float = 0.5
    speed: float = 0.5

    def start(self, simulations: int, generator: torch.Generator) -> Simulations:
        couplings = self.couplings(simulations, generator)
        x, v = torch.randn(2, simulations, self.bodies, 2, generator=generator)
        states = torch.cat([self.spread * x, self.speed * torch.nn.functional.normalize(v, dim=-1)], -1)
        return self._begin(states, couplings, torch.ones(simulations, self.bodies, 1))

    @abc.abstractmethod
    def couplings(self, simulations: int, generator: torch.Generator) -> Tensor:
        """(S, N, N)."""

    def collide(self, x: Tensor, v: Tensor, properties: Tensor) -> None:
        over = x - x.clamp(-self.box, self.box)
        if over.any():
            x.sub_(over, alpha=2)
            v.copy_(torch.where(over == 0, v, -over.sign() * v.abs()))


@dataclass(frozen=True, kw_only=True)
class Springs(Boxed):
    """F_n = -k sum_m A_mn (x_n - x_m), A symmetric, each pair being joined with `probability` (Kipf et al. 2018,
    appendix B.1: half of the pairs, k = 0.1, first positions of deviation 0.5, steps of 0.001, seen every 100).

    Unlike their code, velocities are those at the time of the positions, not half a step before it.

    Example:

        >>> from structconv_systems.data.physics import Springs
        >>> system = Springs(bodies=3, every=10)
        >>> simulations = system.simulate(2, times=50, seed=0)
        >>> energy = system.energy(simulations)            # (S, T); half springs, half motion
        >>> bool(((energy - energy[:, :1]).abs() < 0.01).all())
        True
    """

    stiffness: float = 0.1
    probability: float = 0.5

    def couplings(self, simulations: int, generator: torch.Generator) -> Tensor:
        return _joined(simulations, self.bodies, self.probability, generator)

    def acceleration(self, x: Tensor, couplings: Tensor, properties: Tensor) -> Tensor:
        """A x - deg x, a body m at a time: no tensor of all pairs is made."""
        force = x * -couplings.sum(0)
        for m in range(self.bodies):
            force.addcmul_(couplings[m], x[:, m:m + 1])
        return force.mul_(self.stiffness)

    def potential(self, positions: Tensor, simulations: Simulations) -> Tensor:
        return self.stiffness / 4 * _over_pairs(positions, simulations.couplings, lambda squared: squared)


@dataclass(frozen=True, kw_only=True)
class Charges(Boxed):
    """F_n = sum_m q_m q_n (x_n - x_m) / |x_n - x_m|^3 with charges 1 or -1, equally probable (Kipf et al. 2018,
    appendix B.1): couplings are q_m q_n, 1 where bodies repel one another and -1 where they attract.

    Each component of a force is held below `largest`, as theirs, so that energy is lost or won where bodies of unlike
    charge come closer than 0.1 to one another.

    Example:

        >>> from structconv_systems.data.physics import Charges
        >>> simulations = Charges(bodies=3).simulate(2, times=5, seed=0)
        >>> simulations.couplings.unique().tolist()        # alike charges, and others
        [-1.0, 0.0, 1.0]
    """

    spread: float = 1.0
    largest: float = 100.0

    def couplings(self, simulations: int, generator: torch.Generator) -> Tensor:
        charges = 2.0 * torch.randint(2, (simulations, self.bodies, 1), generator=generator) - 1
        return charges * charges.mT * (1 - torch.eye(self.bodies))

    def acceleration(self, x: Tensor, couplings: Tensor, properties: Tensor) -> Tensor:
        offset = x.unsqueeze(1) - x.unsqueeze(2)
        squared = offset.square().sum(0) + torch.eye(self.bodies).unsqueeze(-1)
        offset *= couplings / (squared * squared.sqrt())
        return _sum_over_first(offset).clamp_(-self.largest, self.largest)

    def potential(self, positions: Tensor, simulations: Simulations) -> Tensor:
        return _over_pairs(positions, simulations.couplings, lambda squared: squared.rsqrt()) / 2


@dataclass(frozen=True, kw_only=True)
class Oscillators(System):
    """d phi_n / dt = w_n + sum_m A_mn sin(phi_n - phi_m), half of the pairs joined (Kuramoto; Kipf et al. 2018,
    appendix B.1), by Runge and Kutta's fourth order, in steps of 0.01, seen every 10.

    States are [d phi / dt, sin phi, w]; `properties` are [w, phi] with the initial phi in radians. w is uniform in [1,
    10), phi in [0, 2 pi).

    Args:
        cosine: if True, states are [d phi / dt, sin phi, cos phi, w], which determine the phase. Not in the paper.

    Example:

        >>> from structconv_systems.data.physics import Oscillators
        >>> simulations = Oscillators(bodies=3).simulate(2, times=5, seed=0)
        >>> simulations.states.shape                       # C = 3
        torch.Size([2, 5, 3, 3])
    """

    step: float = 0.01
    every: int = 10
    probability: float = 0.5
    cosine: bool = False

    def start(self, simulations: int, generator: torch.Generator) -> Simulations:
        couplings = _joined(simulations, self.bodies, self.probability, generator)
        own, phase = torch.rand(2, simulations, self.bodies, generator=generator)
        properties = torch.stack([1 + 9 * own, 2 * math.pi * phase], -1)
        state = self._observed(properties[..., 1].T, properties[..., 0].T, couplings.permute(1, 2, 0))
        return self._begin(state.permute(2, 1, 0), couplings, properties)

    def states(self, start: Simulations, times: int) -> Tensor:
        """Phases are what is integrated, from where the simulation began."""
        own, phase = start.properties.double().permute(2, 1, 0).contiguous()
        couplings = start.couplings.double().permute(1, 2, 0).contiguous()
        phases = [phase]
        for _ in range(times - 1):
            phases.append(self._evolved(phases[-1], own, couplings))
        observed = torch.stack([self._observed(phase, own, couplings) for phase in phases])
        return observed.float().permute(3, 0, 2, 1).contiguous()

    def _evolved(self, phase: Tensor, own: Tensor, couplings: Tensor) -> Tensor:
        for _ in range(self.every):
            slopes = [self._slope(phase, own, couplings)]
            for share in (0.5, 0.5, 1.0):
                slopes.append(self._slope(phase + share * self.step * slopes[-1], own, couplings))
            phase = phase + self.step / 6 * (slopes[0] + 2 * slopes[1] + 2 * slopes[2] + slopes[3])
        return phase

    @staticmethod
    def _slope(phase: Tensor, own: Tensor, couplings: Tensor) -> Tensor:
        return own + (couplings * (phase.unsqueeze(0) - phase.unsqueeze(1)).sin()).sum(0)

    def _observed(self, phase: Tensor, own: Tensor, couplings: Tensor) -> Tensor:
        circle = [phase.sin(), phase.cos()] if self.cosine else [phase.sin()]
        return torch.stack([self._slope(phase, own, couplings), *circle, own])


@dataclass(frozen=True, kw_only=True)
class Gravity(Newtonian):
    """F_n = -G sum_m m_m m_n (x_n - x_m) / (|x_n - x_m|^2 + softening^2)^(3/2): a star of mass 100 kg and others of
    0.02 to 9 kg around it, at 10 to 100 m in either direction, on circles if it were for the star alone (Battaglia et
    al. 2016, section 4). G = 10^5 m^3 / (kg s^2), steps of 0.0001 s, seen every 10.

    Args:
        softening: distance in m below which the attraction weakens; energy is conserved.

    Example:

        >>> from structconv_systems.data.physics import Gravity
        >>> simulations = Gravity(bodies=3).simulate(2, times=5, seed=0)
        >>> simulations.properties[:, 0, 0].tolist()       # the stars' masses
        [100.0, 100.0]
    """

    bodies: int = 6
    step: float = 1e-4
    every: int = 10
    constant: float = 1e5
    star: float = 100.0
    softening: float = 1.0

    def start(self, simulations: int, generator: torch.Generator) -> Simulations:
        mass, radius, angle, turn = torch.rand(4, simulations, self.bodies, generator=generator)
        mass, radius, angle = 0.02 + 8.98 * mass, 10 + 90 * radius, 2 * math.pi * angle
        speed = (self.constant * self.star / radius).sqrt() * torch.where(turn < 0.5, -1.0, 1.0)
        x, y = radius * angle.cos(), radius * angle.sin()
        states = torch.stack([x, y, -speed * angle.sin(), speed * angle.cos()], -1)
        states[:, 0], mass[:, 0] = 0.0, self.star
        couplings = mass.unsqueeze(-1) * mass.unsqueeze(-2) * (1 - torch.eye(self.bodies))
        return self._begin(states, couplings, mass.unsqueeze(-1))

    def acceleration(self, x: Tensor, couplings: Tensor, properties: Tensor) -> Tensor:
        offset = x.unsqueeze(2) - x.unsqueeze(1)
        squared = offset.square().sum(0) + torch.eye(self.bodies).unsqueeze(-1) + self.softening ** 2
        offset *= self.constant * properties[0].unsqueeze(1) / (squared * squared.sqrt())
        return _sum_over_first(offset)

    def potential(self, positions: Tensor, simulations: Simulations) -> Tensor:
        return -self.constant / 2 * _over_pairs(positions, simulations.couplings,
                                                lambda squared: (squared + self.softening ** 2).rsqrt())


@dataclass(frozen=True, kw_only=True)
class Balls(Newtonian):
    """Balls of 0.75 to 1.25 kg and of 0.1 to 0.2 m radius that bounce from one another and from the walls of a box of
    2 m, at first 0.5 to 2 m/s fast (after Battaglia et al. 2016, section 4). Steps of 0.001 s, seen every 10;
    `properties` are mass and radius.

    Pairs that touch and approach collide one after the other, without a change of position. `restitution` is the
    remaining share of the closing speed; with 1 energy is conserved except for rounding.

    Example:

        >>> from structconv_systems.data.physics import Balls
        >>> simulations = Balls(bodies=3, box=1.0).simulate(2, times=50, seed=0)
        >>> bool((simulations.states[..., :2].abs() <= 1.0).all())
        True
    """

    bodies: int = 6
    step: float = 1e-3
    every: int = 10
    box: float = 1.0
    restitution: float = 1.0

    def start(self, simulations: int, generator: torch.Generator) -> Simulations:
        """Positions are drawn in the cells of a grid, so that no two balls overlap."""
        side = math.ceil(math.sqrt(self.bodies))
        cell = 2 * self.box / side
        order = torch.rand(simulations, side * side, generator=generator).argsort(-1)[:, :self.bodies]
        mass, radius, angle, speed, x, y = torch.rand(6, simulations, self.bodies, generator=generator)
        radius = (0.1 + 0.1 * radius).clamp(max=0.45 * cell)
        middle = torch.stack([order % side, order // side], -1) * cell + cell / 2 - self.box
        positions = middle + (2 * torch.stack([x, y], -1) - 1) * (cell / 2 - radius.unsqueeze(-1))
        speed, angle = 0.5 + 1.5 * speed, 2 * math.pi * angle
        velocities = torch.stack([speed * angle.cos(), speed * angle.sin()], -1)
        couplings = torch.ones(simulations, self.bodies, self.bodies) - torch.eye(self.bodies)
        properties = torch.stack([0.75 + 0.5 * mass, radius], -1)
        return self._begin(torch.cat([positions, velocities], -1), couplings, properties)

    def acceleration(self, x: Tensor, couplings: Tensor, properties: Tensor) -> Tensor:
        return torch.zeros(1, 1, 1, dtype=x.dtype)

    def potential(self, positions: Tensor, simulations: Simulations) -> Tensor:
        return torch.zeros(1, 1, dtype=torch.float64)

    def collide(self, x: Tensor, v: Tensor, properties: Tensor) -> None:
        mass, radius = properties
        for m, n in combinations(range(self.bodies), 2):
            offset, closing = x[:, m] - x[:, n], v[:, m] - v[:, n]
            squared, towards = offset.square().sum(0), (offset * closing).sum(0)
            hit = (squared < (radius[m] + radius[n]) ** 2) & (towards < 0)
            if hit.any():
                push = (1 + self.restitution) * towards / (squared * (mass[m] + mass[n])) * hit
                v[:, m] -= mass[n] * push * offset
                v[:, n] += mass[m] * push * offset
        walls = self.box - radius
        outside = (x.abs() > walls) & (x * v > 0)
        v.mul_(torch.where(outside, -self.restitution, 1.0))


@dataclass(frozen=True, kw_only=True)
class String(Newtonian):
    """Masses of 0.05 kg in a row, 0.2 m apart, springs of 100 N/m between neighbors, under 9.8 m/s^2; the first, and
    in half of the simulations the last too, is fixed, and a disk of 0.3 m radius somewhere below lets nothing in
    (after Battaglia et al. 2016, section 4). Steps of 0.0002 s, seen every 50; `properties` are mass, 1 where a body
    is fixed, and x, y of the disk. Masses bounce from the disk without loss.

    Example:

        >>> from structconv_systems.data.physics import String
        >>> simulations = String(bodies=4).simulate(2, times=5, seed=0)
        >>> int((simulations.couplings[0] != 0).sum())     # three springs, in both directions
        6
    """

    bodies: int = 15
    step: float = 2e-4
    every: int = 50
    mass: float = 0.05
    length: float = 0.2
    stiffness: float = 100.0
    weight: float = 9.8
    disk: float = 0.3

    def start(self, simulations: int, generator: torch.Generator) -> Simulations:
        both, x, y = torch.rand(3, simulations, generator=generator)
        span = self.length * (self.bodies - 1)
        fixed = torch.zeros(simulations, self.bodies)
        fixed[:, 0], fixed[:, -1] = 1, (both < 0.5).float()
        disk = torch.stack([span * x, -2.5 * self.disk - span / 2 * y], -1).unsqueeze(1)
        states = torch.zeros(simulations, self.bodies, 4)
        states[..., 0] = self.length * torch.arange(self.bodies)
        neighbors = torch.ones(self.bodies - 1).diag(1) if self.bodies > 1 else torch.zeros(1, 1)
        properties = torch.cat([torch.full_like(fixed, self.mass).unsqueeze(-1), fixed.unsqueeze(-1),
                                disk.expand(-1, self.bodies, -1)], -1)
        return self._begin(states, (neighbors + neighbors.T).repeat(simulations, 1, 1), properties)

    def acceleration(self, x: Tensor, couplings: Tensor, properties: Tensor) -> Tensor:
        offset = x[:, 1:] - x[:, :-1]
        distance = offset.square().sum(0).sqrt()
        pull = self.stiffness / self.mass * (1 - self.length / distance) * offset
        force = torch.zeros_like(x)
        force[1] = -self.weight
        force[:, :-1] += pull
        force[:, 1:] -= pull
        return force * (1 - properties[1])

    def collide(self, x: Tensor, v: Tensor, properties: Tensor) -> None:
        offset = x - properties[2:]
        squared, towards = offset.square().sum(0), (offset * v).sum(0)
        hit = (squared < self.disk ** 2) & (towards < 0)
        v -= 2 * hit * towards / squared * offset

    def potential(self, positions: Tensor, simulations: Simulations) -> Tensor:
        stretch = (positions[:, :, 1:] - positions[:, :, :-1]).norm(dim=-1) - self.length
        return self.mass * self.weight * positions[..., 1].sum(-1) + self.stiffness / 2 * stretch.square().sum(-1)


#: By name.
SYSTEMS: dict[str, type[System]] = {"springs": Springs, "charged": Charges, "kuramoto": Oscillators,
                                    "gravity": Gravity, "balls": Balls, "string": String}


def _sum_over_first(pairs: Tensor) -> Tensor:
    """Sum (2, M, N, S) -> (2, N, S), in order."""
    total = pairs[:, 0].clone()
    for m in range(1, pairs.shape[1]):
        total += pairs[:, m]
    return total


def _joined(simulations: int, bodies: int, probability: float, generator: torch.Generator) -> Tensor:
    """Join pairs with a probability: symmetric, without loops."""
    upper = (torch.rand(simulations, bodies, bodies, generator=generator) < probability).float().triu(1)
    return upper + upper.mT


def _over_pairs(positions: Tensor, couplings: Tensor, of_squared: Callable[[Tensor], Tensor]) -> Tensor:
    """Sum a function of the squared distance times the coupling over ordered pairs: (S, T)."""
    squared = (positions.unsqueeze(-2) - positions.unsqueeze(-3)).square().sum(-1)
    weights = couplings.double().unsqueeze(1)
    return (of_squared(squared.masked_fill(weights == 0, 1.0)) * weights).sum((-1, -2))
