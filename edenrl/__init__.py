"""Robot-learning algorithms as TorchRL primitives.

The rooms are imported by name, so that `import edenrl` itself stays instant and loads neither torch nor an extra:
`edenrl.objectives` (losses and advantage estimators), `edenrl.collectors`, `edenrl.modules`, `edenrl.envs`,
`edenrl.optim`, `edenrl.training`, `edenrl.export` and `edenrl.config`.

Examples:
    >>> import edenrl
    >>> edenrl.__version__.count(".")
    2
"""

__version__ = "0.1.0"
