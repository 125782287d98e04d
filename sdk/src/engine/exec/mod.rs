//! Runs a model on inputs and outputs that are bound in place, as a CUDA graph where a shape fits.

mod bound_model;
mod graphs;
mod inputs;
mod run;

pub(super) use bound_model::{BoundModel, DeviceOutput, DeviceTensor, Placed};
pub(super) use graphs::{Graphs, Shape};
pub(super) use inputs::{Dim, Input, Sizes, Values, tensor_in_place};
pub(super) use run::run;
