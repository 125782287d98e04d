//! `ai.pagoda.BlockLinear`: the product with a matrix of 4 or 8 bits.

use pagoda_kernels::{BLOCK, CodeBits, OUTPUT_BLOCK};

use crate::ort::{Dim, F32, Input, KernelContext, KernelInfo, OpError, Operator, Output, Shape, ShapeInferContext, U8};

/// The product with a matrix whose weights are stored in blocks.
pub struct BlockLinear;

impl Operator for BlockLinear {
    const INPUTS: &'static [Input] = &[
        Input::required("x", F32),
        Input::required("codes", U8),
        Input::required("scales", F32),
        Input::optional("offsets", F32),
        Input::optional("bias", F32),
    ];
    const OUTPUTS: &'static [Output] = &[Output::required("y", F32), Output::optional("maxima", F32)];

    fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
        let (Some(x), Some(codes)) = (node.input(0)?, node.input(1)?) else { return Ok(vec![]) };
        match (&x.dims[..], &codes.dims[..]) {
            ([rows, _], [width, ..]) => {
                let shape = |width| Some(Shape { element: F32, dims: vec![rows.clone(), width] });
                let blocks = match width {
                    Dim::Fixed(width) => shape(Dim::Fixed((width + OUTPUT_BLOCK as i64 - 1) / OUTPUT_BLOCK as i64)),
                    _ => None,
                };
                Ok(vec![shape(width.clone()), blocks])
            }
            _ => Ok(vec![]),
        }
    }

    fn new(_info: &KernelInfo) -> Result<Self, OpError> {
        Ok(Self)
    }

    fn compute(&self, context: &KernelContext) -> Result<(), OpError> {
        let (x, codes, scales) = (context.input(0)?, context.input(1)?, context.input(2)?);
        let (offsets, bias) = (context.optional_input(3)?, context.optional_input(4)?);
        let ([rows, inner], [width, _, bytes]) = (x.shape()?, codes.shape()?);
        let Some(bits) = CodeBits::of_block(bytes) else {
            let message = format!(
                "{}: shape {:?}, expected 16 bytes a block of {BLOCK} (4 bits) or {BLOCK} bytes (8 bits)",
                codes.name, codes.dims
            );
            return Err(OpError::invalid(message));
        };
        if inner % BLOCK != 0 {
            let message = format!("{}: shape {:?}, expected rows of a multiple of {BLOCK} numbers", x.name, x.dims);
            return Err(OpError::invalid(message));
        }
        codes.expect_shape(&[width, inner / BLOCK, bytes])?;
        for of_blocks in [Some(&scales), offsets.as_ref()].into_iter().flatten() {
            of_blocks.expect_shape(&[width, inner / BLOCK])?;
        }
        if let Some(bias) = &bias {
            bias.expect_shape(&[width])?;
        }
        let y = context.output(0, &[rows, width])?;
        y.check_disjoint([&x, &codes, &scales])?;
        y.check_disjoint(offsets.iter().chain(&bias))?;
        let maxima = context.optional_output(1, &[rows, width.div_ceil(OUTPUT_BLOCK)])?;
        if let Some(maxima) = &maxima {
            maxima.check_disjoint([&x, &codes, &scales])?;
            maxima.check_disjoint(offsets.iter().chain(&bias))?;
            maxima.check_disjoint_output(&y)?;
        }
        // SAFETY: tensors of the CPU provider are in host memory and have the element types of `INPUTS` and `OUTPUTS`. Nothing
        // writes to an input of a running node. The outputs are disjoint from every input and from each other.
        unsafe {
            let call = pagoda_kernels::BlockLinear {
                rows,
                inner,
                width,
                x: x.slice(),
                codes: codes.slice(),
                bits,
                scales: scales.slice(),
                offsets: offsets.as_ref().map(|offsets| offsets.slice()),
                bias: bias.as_ref().map(|bias| bias.slice()),
            };
            Ok(call.run(y.slice_mut(), maxima.as_ref().map(|maxima| maxima.slice_mut()), context)?)
        }
    }
}
