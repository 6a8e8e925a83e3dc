"""What every section of a configuration is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$", max_length=60)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Epsilon = Annotated[float, Field(ge=0.01, le=50)]
LICENCE = Field("not declared", max_length=200, description="Licence of the data, for release statements.")


class Model(BaseModel):
    """Base of every section: immutable, unknown keys are errors, NaN and infinity are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
