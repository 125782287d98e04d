//! `OrtKernelInfo`: what a kernel learns of its node when the session is created.

use std::ffi::{CStr, c_char};
use std::ptr::{null, null_mut};

use ort_sys::{OrtApi, OrtKernelInfo, OrtMemType, OrtStatusPtr};

use super::error::{OpError, check};

/// The node of a kernel: its attributes, its inputs and outputs, its device and its session's configuration.
pub struct KernelInfo {
    pub(super) api: &'static OrtApi,
    pub(super) raw: *const OrtKernelInfo,
    /// The name of the operator, for error messages.
    pub(super) operator: &'static CStr,
}

impl KernelInfo {
    /// An integer attribute, if the node has it.
    pub fn int(&self, name: &CStr) -> Result<Option<i64>, OpError> {
        match self.raw_int(name) {
            Some(value) => Ok(Some(value)),
            None if self.raw_float(name).is_some() => Err(Self::wrong_type(name, "a float", "an int")),
            None => self.absent(name, "an int"),
        }
    }

    /// A float attribute, if the node has it. An integer is accepted: Python's `alpha=2` makes one.
    pub fn float(&self, name: &CStr) -> Result<Option<f32>, OpError> {
        match self.raw_float(name).or_else(|| self.raw_int(name).map(|value| value as f32)) {
            Some(value) => Ok(Some(value)),
            None => self.absent(name, "a float"),
        }
    }

    /// A string attribute, if the node has it.
    pub fn string(&self, name: &CStr) -> Result<Option<String>, OpError> {
        let read = |to: *mut c_char, size: &mut usize| {
            // SAFETY: the info is live while the kernel is created; a null buffer asks for the size alone.
            self.succeeded(unsafe { (self.api.KernelInfoGetAttribute_string)(self.raw, name.as_ptr(), to, size) })
        };
        let mut size = 0;
        if !read(null_mut(), &mut size) {
            let found = self.raw_int(name).map(|_| "an int").or(self.raw_float(name).map(|_| "a float"));
            return found.map_or(Ok(None), |found| Err(Self::wrong_type(name, found, "a string")));
        }
        let mut bytes = vec![0_u8; size];
        if !read(bytes.as_mut_ptr().cast(), &mut size) {
            return Err(OpError::failed(format!("{}: this attribute can not be read", name.to_string_lossy())));
        }
        // The size includes the terminating NUL.
        bytes.pop();
        let not_utf8 = |_| OpError::invalid(format!("{}: this attribute is not UTF-8", name.to_string_lossy()));
        String::from_utf8(bytes).map(Some).map_err(not_utf8)
    }

    /// A required integer attribute of at least 1.
    pub fn positive_int(&self, name: &CStr) -> Result<usize, OpError> {
        let found = self.int(name)?;
        let fits = |value: i64| usize::try_from(value).ok().filter(|value| (1..=i32::MAX as usize).contains(value));
        found.and_then(fits).ok_or_else(|| {
            let found = found.map_or("missing".into(), |value| value.to_string());
            self.wrong_value(name, &found, "an int of at least 1")
        })
    }

    /// A required string attribute that `parse` accepts. `expected` lists the accepted strings for the error message.
    pub fn choice<V>(&self, name: &CStr, expected: &str, parse: impl Fn(&str) -> Option<V>) -> Result<V, OpError> {
        let found = self.string(name)?;
        found.as_deref().and_then(parse).ok_or_else(|| {
            let found = found.as_deref().unwrap_or("missing");
            self.wrong_value(name, found, expected)
        })
    }

    /// An integer attribute that is 0 or 1. The default is 0.
    pub fn flag(&self, name: &CStr) -> Result<bool, OpError> {
        match self.int(name)?.unwrap_or(0) {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(self.wrong_value(name, &other.to_string(), "0 or 1")),
        }
    }

    /// Whether the node has an input: a graph may omit optional ones.
    pub fn has_input(&self, index: usize) -> Result<bool, OpError> {
        let (mut count, mut size) = (0, 0);
        // SAFETY: the info is live while the kernel is created; a null buffer asks for the size of the name alone.
        unsafe {
            check(self.api, (self.api.KernelInfo_GetInputCount)(self.raw, &mut count))?;
            if index >= count {
                return Ok(false);
            }
            check(self.api, (self.api.KernelInfo_GetInputName)(self.raw, index, null_mut(), &mut size))?;
        }
        // An omitted input has an empty name: the terminating NUL alone.
        Ok(size > 1)
    }

    /// Whether the node has an output: a graph may omit optional ones.
    pub fn has_output(&self, index: usize) -> Result<bool, OpError> {
        let (mut count, mut size) = (0, 0);
        // SAFETY: as in `has_input`.
        unsafe {
            check(self.api, (self.api.KernelInfo_GetOutputCount)(self.raw, &mut count))?;
            if index >= count {
                return Ok(false);
            }
            check(self.api, (self.api.KernelInfo_GetOutputName)(self.raw, index, null_mut(), &mut size))?;
        }
        Ok(size > 1)
    }

    /// Whether an input is an initializer of the model: its value never changes, and no other node writes it.
    pub fn is_constant(&self, index: usize) -> Result<bool, OpError> {
        let (mut constant, mut value) = (0, null());
        // SAFETY: the info is live while the kernel is created, and owns the value.
        let asked = unsafe { (self.api.KernelInfoGetConstantInput_tensor)(self.raw, index, &mut constant, &mut value) };
        check(self.api, asked)?;
        Ok(constant != 0)
    }

    /// Whether all of these inputs are initializers. Omitted inputs do not count.
    pub fn all_constant(&self, inputs: &[usize]) -> Result<bool, OpError> {
        for &index in inputs {
            if self.has_input(index)? && !self.is_constant(index)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// A configuration entry of the node's session, if it is set.
    pub fn session_entry(&self, key: &CStr) -> Result<Option<String>, OpError> {
        let mut entries = null_mut();
        // SAFETY: the info is live while the kernel is created; this function owns the entries and releases them once.
        let value = unsafe {
            check(self.api, (self.api.KernelInfo_GetConfigEntries)(self.raw, &mut entries))?;
            let value = (self.api.GetKeyValue)(entries, key.as_ptr());
            let value = (!value.is_null()).then(|| CStr::from_ptr(value).to_str().map(str::to_owned));
            (self.api.ReleaseKeyValuePairs)(entries);
            value
        };
        let not_utf8 = |_| OpError::invalid(format!("{}: this entry is not UTF-8", key.to_string_lossy()));
        value.transpose().map_err(not_utf8)
    }

    /// The ordinal of the node's device, as the default allocator of its provider reports it.
    pub fn device(&self) -> Result<usize, OpError> {
        let (mut allocator, mut memory, mut id) = (null_mut(), null(), 0);
        // SAFETY: the info is live while the kernel is created. This function owns the allocator and releases it once; the
        // description of its memory belongs to the allocator.
        unsafe {
            let default = OrtMemType::OrtMemTypeDefault;
            check(self.api, (self.api.KernelInfoGetAllocator)(self.raw, default, &mut allocator))?;
            let asked = check(self.api, (self.api.AllocatorGetInfo)(allocator, &mut memory))
                .and_then(|()| check(self.api, (self.api.MemoryInfoGetId)(memory, &mut id)));
            (self.api.ReleaseAllocator)(allocator);
            asked?;
        }
        usize::try_from(id).map_err(|_| OpError::failed(format!("the node is on device {id}, which is none")))
    }

    fn raw_int(&self, name: &CStr) -> Option<i64> {
        let mut value = 0;
        // SAFETY: the info is live while the kernel is created.
        self.succeeded(unsafe { (self.api.KernelInfoGetAttribute_int64)(self.raw, name.as_ptr(), &mut value) })
            .then_some(value)
    }

    fn raw_float(&self, name: &CStr) -> Option<f32> {
        let mut value = 0.0;
        // SAFETY: the info is live while the kernel is created.
        self.succeeded(unsafe { (self.api.KernelInfoGetAttribute_float)(self.raw, name.as_ptr(), &mut value) })
            .then_some(value)
    }

    /// `None`, unless the attribute is a string: to ignore that one would give wrong results silently.
    fn absent<V>(&self, name: &CStr, expected: &str) -> Result<Option<V>, OpError> {
        let mut size = 0;
        // SAFETY: the info is live while the kernel is created; a null buffer asks for the size alone.
        let asked = unsafe { (self.api.KernelInfoGetAttribute_string)(self.raw, name.as_ptr(), null_mut(), &mut size) };
        if self.succeeded(asked) { Err(Self::wrong_type(name, "a string", expected)) } else { Ok(None) }
    }

    fn wrong_type(name: &CStr, found: &str, expected: &str) -> OpError {
        OpError::invalid(format!("{}: this attribute is {found}, expected {expected}", name.to_string_lossy()))
    }

    fn wrong_value(&self, name: &CStr, found: &str, expected: &str) -> OpError {
        let (operator, name) = (self.operator.to_string_lossy(), name.to_string_lossy());
        OpError::invalid(format!("{operator}: the attribute {name} is {found}, expected {expected}"))
    }

    /// Whether a call succeeded. Reading an attribute fails where it is missing or has another type.
    fn succeeded(&self, status: OrtStatusPtr) -> bool {
        let succeeded = status.0.is_null();
        if !succeeded {
            // SAFETY: this function owns the status and releases it once.
            unsafe { (self.api.ReleaseStatus)(status.0) };
        }
        succeeded
    }
}
