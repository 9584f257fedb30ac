from hypothesis import HealthCheck, settings

# Shared machines are noisy: a slow example is no failure, and every run tries the same ones.
settings.register_profile(
    "ingot", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("ingot")
