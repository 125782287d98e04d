//! Tensors whose elements are in JSON: a list, flat or nested as the shape is.

use half::{bf16, f16};
use pagoda::json::Json;
use pagoda::{ElementType, Error, Result, Tensor};
use pagoda_requests::fields::{At, flag, real, text};
use serde_json::Value;

use super::values::count;

/// A tensor of `data`.
pub fn read(path: &str, element: ElementType, shape: &[i64], data: &Json) -> Result<Tensor> {
    let mut elements = Vec::new();
    flatten(path, data, &mut elements)?;
    if elements.len() != count(path, shape)? {
        let message = format!("{} elements are not those of the shape {shape:?}", elements.len());
        return Err(Error::invalid(path, message));
    }
    let made = match element {
        ElementType::Bool => {
            let flags = elements.iter().enumerate().map(|(index, value)| flag(At(path, index), value));
            Tensor::from_bools(shape, &flags.collect::<Result<Vec<bool>>>()?)
        }
        ElementType::String => {
            let texts = elements.iter().enumerate().map(|(index, value)| text(At(path, index), value));
            Tensor::from_strings(shape, texts.collect::<Result<_>>()?)
        }
        ElementType::U8 => Tensor::from_slice(shape, &whole::<u8>(path, &elements)?),
        ElementType::U16 => Tensor::from_slice(shape, &whole::<u16>(path, &elements)?),
        ElementType::U32 => Tensor::from_slice(shape, &whole::<u32>(path, &elements)?),
        ElementType::U64 => Tensor::from_slice(shape, &whole::<u64>(path, &elements)?),
        ElementType::I8 => Tensor::from_slice(shape, &whole::<i8>(path, &elements)?),
        ElementType::I16 => Tensor::from_slice(shape, &whole::<i16>(path, &elements)?),
        ElementType::I32 => Tensor::from_slice(shape, &whole::<i32>(path, &elements)?),
        ElementType::I64 => Tensor::from_slice(shape, &whole::<i64>(path, &elements)?),
        ElementType::F16 => Tensor::from_slice(shape, &reals(path, &elements, f16::from_f64)?),
        ElementType::Bf16 => Tensor::from_slice(shape, &reals(path, &elements, bf16::from_f64)?),
        ElementType::F32 => Tensor::from_slice(shape, &reals(path, &elements, |number| number as f32)?),
        _ => Tensor::from_slice(shape, &reals(path, &elements, |number| number)?),
    };
    made.map_err(|error| error.about(path))
}

fn flatten<'a>(path: &str, data: &'a Json, elements: &mut Vec<&'a Json>) -> Result<()> {
    let Json::List(list) = data else { return Err(Error::invalid(path, format!("{data} is not a list"))) };
    for value in list {
        match value {
            Json::List(_) => flatten(path, value, elements)?,
            value => elements.push(value),
        }
    }
    Ok(())
}

fn whole<T: TryFrom<i128>>(path: &str, elements: &[&Json]) -> Result<Vec<T>> {
    let number = |(index, value): (usize, &&Json)| {
        let number = if let Json::Whole(number) = value { T::try_from(*number).ok() } else { None };
        let wrong = || Error::invalid(format!("{path}[{index}]"), format!("{value} is no number of this type"));
        number.ok_or_else(wrong)
    };
    elements.iter().enumerate().map(number).collect()
}

fn reals<T>(path: &str, elements: &[&Json], narrow: impl Fn(f64) -> T) -> Result<Vec<T>> {
    elements.iter().enumerate().map(|(index, value)| real(At(path, index), value).map(&narrow)).collect()
}

/// The elements of a tensor, flat. A number that JSON can not have is null.
pub fn write(tensor: &Tensor) -> Result<Vec<Value>> {
    fn all<T: Copy>(numbers: &[T], value: impl Fn(T) -> Value) -> Vec<Value> {
        numbers.iter().map(|&number| value(number)).collect()
    }
    Ok(match tensor.element_type() {
        ElementType::Bool => tensor.to_bools()?.into_iter().map(Value::from).collect(),
        ElementType::String => tensor.as_strings()?.iter().map(|text| Value::from(text.as_str())).collect(),
        ElementType::U8 => all::<u8>(tensor.as_slice()?, Value::from),
        ElementType::U16 => all::<u16>(tensor.as_slice()?, Value::from),
        ElementType::U32 => all::<u32>(tensor.as_slice()?, Value::from),
        ElementType::U64 => all::<u64>(tensor.as_slice()?, Value::from),
        ElementType::I8 => all::<i8>(tensor.as_slice()?, Value::from),
        ElementType::I16 => all::<i16>(tensor.as_slice()?, Value::from),
        ElementType::I32 => all::<i32>(tensor.as_slice()?, Value::from),
        ElementType::I64 => all::<i64>(tensor.as_slice()?, Value::from),
        ElementType::F16 => all::<f16>(tensor.as_slice()?, |number| f64::from(number).into()),
        ElementType::Bf16 => all::<bf16>(tensor.as_slice()?, |number| f64::from(number).into()),
        ElementType::F32 => all::<f32>(tensor.as_slice()?, |number| f64::from(number).into()),
        _ => all::<f64>(tensor.as_slice()?, Value::from),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(element: ElementType, shape: &[i64], json: &str) -> Result<Tensor> {
        read("inputs[0].data", element, shape, &serde_json::from_str(json).unwrap())
    }

    #[test]
    fn elements_come_and_go_in_json() {
        for (element, json) in [
            (ElementType::Bool, "[true,false]"),
            (ElementType::String, r#"["a","ü"]"#),
            (ElementType::U64, "[18446744073709551615,0]"),
            (ElementType::I8, "[-128,127]"),
            (ElementType::F16, "[0.5,-2.0]"),
            (ElementType::F32, "[0.25,1e+30]"),
            (ElementType::F64, "[0.1,-1.0]"),
        ] {
            let written = serde_json::to_string(&write(&tensor(element, &[2], json).unwrap()).unwrap()).unwrap();
            let (written, json): (Value, Value) =
                (serde_json::from_str(&written).unwrap(), serde_json::from_str(json).unwrap());
            if element == ElementType::F32 {
                assert_eq!(written[1].as_f64().map(|n| n as f32), json[1].as_f64().map(|n| n as f32));
            } else {
                assert_eq!(written, json);
            }
        }
        assert_eq!(
            tensor(ElementType::I32, &[2, 2], "[[1, 2], [3, 4]]").unwrap().as_slice::<i32>().unwrap(),
            [1, 2, 3, 4]
        );
    }

    #[test]
    fn errors_name_the_element() {
        for (element, json, message) in [
            (ElementType::I8, "[1, 200]", "inputs[0].data[1]: 200 is no number of this type"),
            (ElementType::F32, "[1, \"a\"]", "inputs[0].data[1]: \"a\" is not a number"),
            (ElementType::F32, "[1]", "inputs[0].data: 1 elements are not those of the shape [2]"),
            (ElementType::Bool, "[1, true]", "inputs[0].data[0]: 1 is neither true nor false"),
            (ElementType::F32, "7", "inputs[0].data: 7 is not a list"),
        ] {
            let error = tensor(element, &[2], json).map(|_| ()).unwrap_err().to_string();
            assert!(error.starts_with(message), "{error}");
        }
    }
}
