"""The local judge: rules, sandbox, worker, verdict."""
