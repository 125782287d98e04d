//! KServe's names of types.

use pagoda::{ElementType, Error, Result};

const NAMES: [(&str, ElementType); 14] = [
    ("BOOL", ElementType::Bool),
    ("UINT8", ElementType::U8),
    ("UINT16", ElementType::U16),
    ("UINT32", ElementType::U32),
    ("UINT64", ElementType::U64),
    ("INT8", ElementType::I8),
    ("INT16", ElementType::I16),
    ("INT32", ElementType::I32),
    ("INT64", ElementType::I64),
    ("FP16", ElementType::F16),
    ("FP32", ElementType::F32),
    ("FP64", ElementType::F64),
    ("BF16", ElementType::Bf16),
    ("BYTES", ElementType::String),
];

/// The type of a name.
pub fn named(path: &str, name: &str) -> Result<ElementType> {
    let found = NAMES.iter().find(|(known, _)| *known == name);
    found.map(|(_, element)| *element).ok_or_else(|| {
        let names: Vec<&str> = NAMES.iter().map(|(name, _)| *name).collect();
        Error::invalid(path, format!("{name:?} is no type of tensors; there is {}", names.join(", ")))
    })
}

/// The number of a name in the configurations of models over gRPC; 0 for none.
pub fn number(name: &str) -> i32 {
    const NUMBERED: [&str; 14] = [
        "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64",
        "BYTES", "BF16",
    ];
    NUMBERED.iter().position(|known| *known == name).map_or(0, |at| at as i32 + 1)
}

/// The name of a type; `None` for one that KServe does not have.
pub fn name(element: ElementType) -> Option<&'static str> {
    NAMES.iter().find(|(_, known)| *known == element).map(|(name, _)| *name)
}
