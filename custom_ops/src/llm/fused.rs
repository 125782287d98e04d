//! What a product has around it in one node: the norm in front of it, and behind it a bias, the gate of a GLU, a residual, or the cut
//! into several outputs.

use pagoda_kernels::GluActivation;

use crate::ort::{Dim, InputTensor, KernelContext, KernelInfo, OpError, OutputTensor, Shape, ShapeInferContext};

/// The places of the inputs that a graph may omit.
pub struct Places {
    pub bias: usize,
    pub residual: usize,
    pub norm: usize,
}

/// The activation of a node without gates.
const NO_ACTIVATION: &str = "none";

/// The attributes of a node.
pub struct Attributes {
    pub activation: Option<GluActivation>,
    pub epsilon: f32,
    /// The columns of `y2` and of `y3`.
    pub cut: [usize; 2],
}

impl Attributes {
    pub fn read(info: &KernelInfo, places: &Places) -> Result<Self, OpError> {
        let activation = match info.string(c"activation")?.as_deref() {
            None | Some(NO_ACTIVATION) => None,
            Some(name) => Some(GluActivation::named(name).ok_or_else(|| {
                let message = format!("activation: this attribute is {name:?}, expected none, silu, gelu or gelu_tanh");
                OpError::invalid(message)
            })?),
        };
        let epsilon = info.float(c"epsilon")?.unwrap_or(1e-5);
        if !epsilon.is_finite() || epsilon < 0.0 {
            let message = format!("epsilon: this attribute is {epsilon}, expected a finite number of at least 0");
            return Err(OpError::invalid(message));
        }
        let mut cut = [0; 2];
        for (place, (width, attribute, output)) in
            [(c"width2", "width2", "y2"), (c"width3", "width3", "y3")].into_iter().enumerate()
        {
            let found = info.int(width)?.unwrap_or(0);
            cut[place] = usize::try_from(found).ok().filter(|width| *width <= i32::MAX as usize).ok_or_else(|| {
                let most = i32::MAX;
                let message =
                    format!("{attribute}: this attribute is {found}, expected a number of columns from 0 to {most}");
                OpError::invalid(message)
            })?;
            if found > 0 && activation.is_some() {
                let message = format!("{attribute}: this attribute is {found}, expected 0 beside an activation");
                return Err(OpError::invalid(message));
            }
            if found > 0 && info.has_input(places.residual)? {
                let message = format!("{attribute}: this attribute is {found}, expected 0 beside the input residual");
                return Err(OpError::invalid(message));
            }
            if (found > 0) != info.has_output(place + 1)? {
                let message =
                    format!("{output}: this output and the attribute {attribute} go together: give both or neither");
                return Err(OpError::invalid(message));
            }
        }
        Ok(Self { activation, epsilon, cut })
    }
}

/// The shapes of the outputs, for rows of `outer` and so many columns of the product.
pub fn infer_shapes(node: &ShapeInferContext, x: &Shape, columns: &Dim) -> Vec<Option<Shape>> {
    let Some((_, outer)) = x.dims.split_last() else { return vec![] };
    let shape = |width| Some(Shape { element: x.element, dims: outer.iter().cloned().chain([width]).collect() });
    // Wrong attributes are the kernel's to reject, and a wrong number of columns the run's.
    let cut = [c"width2", c"width3"].map(|name| node.int(name).unwrap_or(0));
    let gated = node.string(c"activation").is_some_and(|name| name != NO_ACTIVATION);
    match columns {
        Dim::Fixed(columns) if gated => vec![shape(Dim::Fixed(columns / 2))],
        Dim::Fixed(columns) if cut.iter().all(|width| (0..=*columns).contains(width)) => {
            let [second, third] = cut;
            vec![
                shape(Dim::Fixed((columns - second - third).max(0))),
                shape(Dim::Fixed(second)),
                shape(Dim::Fixed(third)),
            ]
        }
        // Part of a symbol has no name.
        Dim::Symbolic(_) if !gated && cut == [0, 0] => vec![shape(columns.clone())],
        _ => vec![],
    }
}

/// The tensors around a product, with consistent shapes. Outputs are disjoint from every input and from each other.
pub struct Around<'a> {
    pub bias: Option<InputTensor<'a>>,
    pub residual: Option<InputTensor<'a>>,
    pub norm: Option<InputTensor<'a>>,
    /// With their widths.
    pub outputs: [Option<(OutputTensor, usize)>; 3],
}

impl<'a> Around<'a> {
    /// `product`: the inputs of the product itself, x first and the weight second, which has `columns` rows.
    pub fn read(
        context: &'a KernelContext,
        attributes: &Attributes,
        places: &Places,
        product: &[&InputTensor<'a>],
        columns: usize,
    ) -> Result<Self, OpError> {
        let (x, weight) = (product[0], product[1]);
        let Some((&inner, outer)) = x.dims.split_last() else {
            return Err(OpError::invalid(format!("{}: a single number, expected rows", x.name)));
        };
        let dims = |width: usize| outer.iter().copied().chain([width]).collect::<Vec<_>>();
        let optional = |index| context.optional_input(index);
        let (bias, residual, norm) = (optional(places.bias)?, optional(places.residual)?, optional(places.norm)?);
        let width = match attributes.activation {
            Some(_) if !columns.is_multiple_of(2) => {
                let message = format!(
                    "{}: shape {:?}, expected an even number of rows: first those of the gates, then as many ups",
                    weight.name, weight.dims
                );
                return Err(OpError::invalid(message));
            }
            Some(_) => columns / 2,
            None => columns,
        };
        if let Some(bias) = &bias {
            bias.expect_shape(&[columns])?;
        }
        if let Some(residual) = &residual {
            residual.expect_shape(&dims(width))?;
        }
        if let Some(norm) = &norm {
            norm.expect_shape(&[inner])?;
        }
        let [second, third] = attributes.cut;
        let Some(first) = width.checked_sub(second).and_then(|width| width.checked_sub(third)) else {
            let message = format!(
                "{}: shape {:?}, expected at least as many rows as width2 and width3 together, {second} and {third}",
                weight.name, weight.dims
            );
            return Err(OpError::invalid(message));
        };
        let mut outputs = [Some((context.output(0, &dims(first))?, first)), None, None];
        for (index, width) in [(1, second), (2, third)] {
            if width > 0 {
                outputs[index] = Some((context.output(index, &dims(width))?, width));
            }
        }
        for (index, output) in outputs.iter().enumerate() {
            let Some((output, _)) = output else { continue };
            output.check_disjoint(product.iter().copied())?;
            output.check_disjoint(bias.iter().chain(&residual).chain(&norm))?;
            for (other, _) in outputs[..index].iter().flatten() {
                output.check_disjoint_output(other)?;
            }
        }
        Ok(Self { bias, residual, norm, outputs })
    }
}
