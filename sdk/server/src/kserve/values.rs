//! Tensors and the bytes that stand for them. Numbers are little-endian; a text has its length before it, in 4 bytes.

use bytes::Bytes;
use pagoda::{ElementType, Error, Result, Status, Tensor};

/// The number of elements of a shape.
pub fn count(path: &str, shape: &[i64]) -> Result<usize> {
    let product = shape.iter().try_fold(1_usize, |product, &size| product.checked_mul(usize::try_from(size).ok()?));
    product.ok_or_else(|| Error::invalid(path, format!("{shape:?} is no shape: expected sizes of 0 or more")))
}

/// A tensor of bytes.
pub fn from_bytes(path: &str, element: ElementType, shape: &[i64], bytes: &[u8]) -> Result<Tensor> {
    let elements = count(path, shape)?;
    if element == ElementType::String {
        return Tensor::from_strings(shape, texts(path, elements, bytes)?).map_err(|error| error.about(path));
    }
    // Checked before memory is taken: a shape is short and may ask for any amount.
    let expected = elements.checked_mul(element.bits() / 8);
    if expected != Some(bytes.len()) {
        let message = format!("{} bytes are not the {elements} elements of the shape {shape:?}", bytes.len());
        return Err(Error::invalid(path, message));
    }
    if element == ElementType::Bool && bytes.iter().any(|&byte| byte > 1) {
        return Err(Error::invalid(path, "a byte of a BOOL is neither 0 nor 1"));
    }
    Tensor::from_bytes(element, shape, bytes).map_err(|error| error.about(path))
}

fn texts(path: &str, elements: usize, mut bytes: &[u8]) -> Result<Vec<String>> {
    let mut texts = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk::<4>() {
        let length = u32::from_le_bytes(*length) as usize;
        let Some((text, rest)) = rest.split_at_checked(length) else {
            let message = format!("text {} has {length} bytes by its length, and {} follow", texts.len(), rest.len());
            return Err(Error::invalid(path, message));
        };
        let text = std::str::from_utf8(text)
            .map_err(|error| Error::invalid(path, format!("text {} is not UTF-8: {error}", texts.len())))?;
        texts.push(text.to_owned());
        bytes = rest;
    }
    if !bytes.is_empty() || texts.len() != elements {
        let message = format!("{} texts are not the {elements} of the shape", texts.len());
        return Err(Error::invalid(path, message));
    }
    Ok(texts)
}

/// A tensor of numbers in host memory.
struct InHostMemory(Tensor);

impl AsRef<[u8]> for InHostMemory {
    fn as_ref(&self) -> &[u8] {
        let (data, bytes) = self.0.memory().expect("of numbers and in host memory");
        if bytes == 0 {
            return &[];
        }
        // SAFETY: the memory of the tensor, which lives as long as this; the run that wrote it has ended, and nothing else has it.
        unsafe { std::slice::from_raw_parts(data.cast(), bytes) }
    }
}

/// The bytes of a tensor that a run returned. Numbers in host memory are not copied.
pub fn to_bytes(tensor: Tensor) -> Result<Bytes> {
    if tensor.element_type() == ElementType::String {
        let mut bytes = Vec::new();
        for text in tensor.as_strings()? {
            let length = u32::try_from(text.len())
                .map_err(|_| Error::new(Status::Unsupported, "a text of 4 GiB does not fit into a tensor of BYTES"))?;
            bytes.extend_from_slice(&length.to_le_bytes());
            bytes.extend_from_slice(text.as_bytes());
        }
        return Ok(bytes.into());
    }
    if tensor.device().is_none() {
        return Ok(Bytes::from_owner(InHostMemory(tensor)));
    }
    let mut bytes = vec![0; tensor.len() * tensor.element_type().bits() / 8];
    // SAFETY: the run that wrote it has ended.
    unsafe { tensor.copy_out(0, &mut bytes) }?;
    Ok(bytes.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_tensors_are_the_same() {
        let numbers = [1_i32, -2, 3, i32::MAX];
        let bytes = to_bytes(Tensor::from_slice(&[2, 2], &numbers).unwrap()).unwrap();
        assert_eq!(bytes[4..8], [0xfe, 0xff, 0xff, 0xff]);
        let again = from_bytes("x", ElementType::I32, &[2, 2], &bytes).unwrap();
        assert_eq!(again.as_slice::<i32>().unwrap(), numbers);
        assert_eq!(to_bytes(Tensor::zeros(ElementType::F32, &[0, 3]).unwrap()).unwrap(), Bytes::new());
        let texts = ["a".to_owned(), String::new(), "ü".to_owned()];
        let bytes = to_bytes(Tensor::from_strings(&[3], texts.to_vec()).unwrap()).unwrap();
        assert_eq!(bytes, &b"\x01\0\0\0a\0\0\0\0\x02\0\0\0\xc3\xbc"[..]);
        let again = from_bytes("x", ElementType::String, &[3], &bytes).unwrap();
        assert_eq!(again.as_strings().unwrap(), texts);
    }

    #[test]
    fn what_does_not_fit_is_refused_before_memory_is_taken() {
        for (element, shape, bytes, message) in [
            (ElementType::F32, &[1 << 40][..], &[0; 4][..], "x: 4 bytes are not the 1099511627776 elements"),
            (ElementType::F32, &[i64::MAX, i64::MAX], &[], "x: [9223372036854775807, 9223372036854775807] is no shape"),
            (ElementType::F32, &[-1], &[], "x: [-1] is no shape"),
            (ElementType::F32, &[2], &[0; 7], "x: 7 bytes are not the 2 elements"),
            (ElementType::Bool, &[1], &[2], "x: a byte of a BOOL"),
            (ElementType::String, &[1], &[9, 0, 0, 0, 1], "x: text 0 has 9 bytes by its length, and 1 follow"),
            (ElementType::String, &[1], &[1, 0, 0, 0, 0xff], "x: text 0 is not UTF-8"),
            (ElementType::String, &[2], &[0, 0, 0, 0], "x: 1 texts are not the 2"),
            (ElementType::String, &[1], &[0, 0, 0, 0, 0], "x: 1 texts are not the 1"),
        ] {
            let error = from_bytes("x", element, shape, bytes).map(|_| ()).unwrap_err().to_string();
            assert!(error.starts_with(message), "{error}");
        }
    }
}
