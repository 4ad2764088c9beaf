"""Every error this package raises on purpose; each is also a standard error and can be pickled.

RadixError
├── ConfigurationError (ValueError)     a setting that is unknown, malformed or contradicts another
├── DataError (ValueError)              a data file or record that cannot be used; names file and line
├── RequestError (ValueError)           a request no retry can save (HTTP 400)
├── EngineError (RuntimeError)          an engine that failed (HTTP 500)
│   ├── EngineDeadError (ConnectionError)     it does not answer, or its worker died
│   ├── EngineStateError                a call that its state forbids: paused, asleep, no weights (HTTP 409)
│   └── WeightUpdateError               an update that was refused; says which weights are in force
├── ReplayError (ValueError)            replay outputs that do not fit the tokens; names sample and field
├── RewardError (RuntimeError)          rewards that failed too often; names problem and sample
├── CheckpointError (OSError)            a checkpoint that the disk did not take; names path and reason
└── TrainingError (RuntimeError)        a worker that failed; carries its traceback
"""


class RadixError(Exception):
    """Root of this package's errors."""


class ConfigurationError(RadixError, ValueError): ...


class DataError(RadixError, ValueError): ...


class RequestError(RadixError, ValueError): ...


class EngineError(RadixError, RuntimeError): ...


class EngineDeadError(EngineError, ConnectionError): ...


class EngineStateError(EngineError): ...


class WeightUpdateError(EngineError): ...


class ReplayError(RadixError, ValueError): ...


class RewardError(RadixError, RuntimeError): ...


class CheckpointError(RadixError, OSError): ...


class TrainingError(RadixError, RuntimeError): ...
