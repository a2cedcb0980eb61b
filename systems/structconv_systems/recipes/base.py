"""The parts of training that recipes are written with."""

from structconv_systems.train.batches import Batches, Windows, generator
from structconv_systems.train.loop import Schedule, Task
from structconv_systems.train.parts import Parts
from structconv_systems.train.progress import Progress
from structconv_systems.train.run import Run
from structconv_systems.train.study import (
    Finished,
    Job,
    Study,
    fitted_job,
    jobs_of,
    loaded,
    parameters_of,
    untrained_job,
)
from structconv_systems.train.task import BatchTask, mean_loss

__all__ = ["BatchTask", "Batches", "Finished", "Job", "Parts", "Progress", "Run", "Schedule", "Study", "Task",
           "Windows", "fitted_job", "generator", "jobs_of", "loaded", "mean_loss", "parameters_of", "untrained_job"]
