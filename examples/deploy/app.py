"""The functions that the workers of these deployments run."""

import perdure


@perdure.step
def look_up(city: str) -> int:
    return {"Lisbon": 120, "Oslo": 240}[city]


@perdure.durable
def travel(city: str) -> str:
    return f"{city} for {look_up(city)}"
