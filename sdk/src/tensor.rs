//! Tensors: an element type, dimensions, and memory that is ours, the caller's, or ONNX Runtime's; of the host, or of a
//! GPU.

#[cfg(feature = "ndarray")]
mod ndarray;

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc};
use std::any::Any;
use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use half::{bf16, f16};

use crate::device::{DeviceMemory, Gpu, PinnedMemory};
use crate::error::{Error, Result, Status};
use crate::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

/// What ONNX Runtime aligns its own tensors to, and enough for every vector unit.
const ALIGNMENT: usize = 64;

macro_rules! element_types {
    ($($(#[$doc:meta])* $variant:ident = $number:literal, $name:literal, $bits:literal;)*) => {
        /// The type of a tensor's elements. The numbers are ONNX's (`TensorProto.DataType`).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(i32)]
        pub enum ElementType {
            $($(#[$doc])* $variant = $number,)*
        }

        impl ElementType {
            /// Every type, in order of its number.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// The type with this number in ONNX.
            pub fn from_number(number: i32) -> Option<Self> {
                match number {
                    $($number => Some(Self::$variant),)*
                    _ => None,
                }
            }

            pub(crate) fn c_name(self) -> &'static CStr {
                match self {
                    $(Self::$variant => $name,)*
                }
            }

            /// Bits an element takes; 0 for strings, whose length varies.
            pub fn bits(self) -> usize {
                match self {
                    $(Self::$variant => $bits,)*
                }
            }
        }
    };
}

element_types! {
    /// 32-bit float.
    F32 = 1, c"f32", 32;
    /// Unsigned 8-bit integer.
    U8 = 2, c"u8", 8;
    /// Signed 8-bit integer.
    I8 = 3, c"i8", 8;
    /// Unsigned 16-bit integer.
    U16 = 4, c"u16", 16;
    /// Signed 16-bit integer.
    I16 = 5, c"i16", 16;
    /// Signed 32-bit integer.
    I32 = 6, c"i32", 32;
    /// Signed 64-bit integer.
    I64 = 7, c"i64", 64;
    /// UTF-8 text of any length.
    String = 8, c"string", 0;
    /// Truth value, one byte, 0 or 1.
    Bool = 9, c"bool", 8;
    /// 16-bit float (IEEE half).
    F16 = 10, c"f16", 16;
    /// 64-bit float.
    F64 = 11, c"f64", 64;
    /// Unsigned 32-bit integer.
    U32 = 12, c"u32", 32;
    /// Unsigned 64-bit integer.
    U64 = 13, c"u64", 64;
    /// Two 32-bit floats.
    Complex64 = 14, c"complex64", 64;
    /// Two 64-bit floats.
    Complex128 = 15, c"complex128", 128;
    /// 16-bit float with the exponent of a 32-bit one.
    Bf16 = 16, c"bf16", 16;
    /// 8-bit float, 4 bits of exponent, no infinity.
    F8E4M3Fn = 17, c"f8e4m3fn", 8;
    /// 8-bit float, 4 bits of exponent, no infinity, no negative zero.
    F8E4M3Fnuz = 18, c"f8e4m3fnuz", 8;
    /// 8-bit float, 5 bits of exponent.
    F8E5M2 = 19, c"f8e5m2", 8;
    /// 8-bit float, 5 bits of exponent, no infinity, no negative zero.
    F8E5M2Fnuz = 20, c"f8e5m2fnuz", 8;
    /// Unsigned 4-bit integer, two a byte, the first in the low bits.
    U4 = 21, c"u4", 4;
    /// Signed 4-bit integer, two a byte, the first in the low bits.
    I4 = 22, c"i4", 4;
    /// 4-bit float, two a byte, the first in the low bits.
    F4E2M1 = 23, c"f4e2m1", 4;
    /// 8-bit power of two, used as a scale.
    F8E8M0 = 24, c"f8e8m0", 8;
    /// Unsigned 2-bit integer, four a byte, the first in the low bits.
    U2 = 25, c"u2", 2;
    /// Signed 2-bit integer, four a byte, the first in the low bits.
    I2 = 26, c"i2", 2;
}

impl ElementType {
    /// Its short name, e.g. `f32`.
    pub fn name(self) -> &'static str {
        self.c_name().to_str().expect("names of types are ASCII")
    }
}

/// A Rust type whose slices can be a tensor's elements.
///
/// # Safety
/// Every bit pattern of the type's size is a value of it, and it has the size and meaning of `TYPE`.
pub unsafe trait Scalar: Copy + Send + Sync + 'static {
    /// The element type it is.
    const TYPE: ElementType;
}

macro_rules! scalars {
    ($($scalar:ty = $variant:ident),*) => {
        // SAFETY: plain numbers of exactly that size.
        $(unsafe impl Scalar for $scalar { const TYPE: ElementType = ElementType::$variant; })*
    };
}

scalars!(
    f32 = F32,
    f64 = F64,
    f16 = F16,
    bf16 = Bf16,
    u8 = U8,
    i8 = I8,
    u16 = U16,
    i16 = I16,
    u32 = U32,
    i32 = I32,
    u64 = U64,
    i64 = I64
);

/// A tensor.
///
/// Cheap to share: runs take it by reference and read or write its memory in place.
pub struct Tensor {
    element: ElementType,
    dims: Box<[i64]>,
    count: usize,
    storage: Storage,
    /// Shared by runs that each write their own part of the memory; exclusive for a run that writes all of it.
    writers: RwLock<()>,
}

enum Storage {
    /// Numbers. The owner frees the memory, or calls the release callback of borrowed memory.
    Numbers { data: NonNull<c_void>, bytes: usize, _owner: Box<dyn Any + Send + Sync> },
    /// Numbers on a GPU, from the byte `at` on.
    Device { memory: Arc<DeviceMemory>, at: usize, bytes: usize },
    /// Numbers in pinned host memory that a GPU reaches at the same address; they count as being on the GPU.
    Pinned { memory: PinnedMemory, bytes: usize },
    /// Texts.
    Strings(Box<[String]>),
}

// SAFETY: the memory is plain bytes that belong to no thread. Each function that writes states when it may (`&mut`, or
// the contract of an unsafe one).
unsafe impl Send for Tensor {}
// SAFETY: as above; shared references only read.
unsafe impl Sync for Tensor {}

impl Tensor {
    /// A tensor of zeros in memory of its own.
    pub fn zeros(element: ElementType, dims: &[i64]) -> Result<Self> {
        let (count, bytes) = size_of_tensor(element, dims)?;
        if element == ElementType::String {
            let mut strings = Vec::new();
            strings.try_reserve_exact(count).map_err(|_| too_large(bytes))?;
            strings.resize(count, String::new());
            return Self::from_strings(dims, strings);
        }
        let buffer = Buffer::zeroed(bytes)?;
        let data = buffer.data;
        let storage = Storage::Numbers { data, bytes, _owner: Box::new(buffer) };
        Ok(Self { element, dims: dims.into(), count, storage, writers: RwLock::default() })
    }

    /// A tensor of zeros on a GPU.
    pub fn zeros_on(gpu: &'static Gpu, element: ElementType, dims: &[i64]) -> Result<Self> {
        let (_, bytes) = size_of_tensor(element, dims)?;
        if element == ElementType::String {
            return Err(Error::invalid("type", "a GPU has no strings: keep them in host memory"));
        }
        let memory = DeviceMemory::zeroed(gpu, bytes).map_err(|error| {
            let error = Error::from(error);
            Error::new(error.status(), format!("a tensor of {bytes} bytes: {}", error.message())).about("dims")
        })?;
        Self::on_device(element, dims, &Arc::new(memory), 0)
    }

    /// A tensor over a part of memory on a GPU, from the byte `at` on, a multiple of 16.
    pub(crate) fn on_device(element: ElementType, dims: &[i64], memory: &Arc<DeviceMemory>, at: usize) -> Result<Self> {
        let (count, bytes) = size_of_tensor(element, dims)?;
        let fits = at.checked_add(bytes).is_some_and(|end| end <= memory.bytes());
        assert!(at.is_multiple_of(16) && fits, "{bytes} bytes at {at} of {}", memory.bytes());
        let storage = Storage::Device { memory: Arc::clone(memory), at, bytes };
        Ok(Self { element, dims: dims.into(), count, storage, writers: RwLock::default() })
    }

    /// A tensor of zeros in pinned host memory: a run treats it as being on the GPU, which writes to it by DMA; the
    /// host can read it as soon as the run has ended.
    pub(crate) fn zeros_pinned(gpu: &'static Gpu, element: ElementType, dims: &[i64]) -> Result<Self> {
        let (count, bytes) = size_of_tensor(element, dims)?;
        let storage = Storage::Pinned { memory: PinnedMemory::zeroed(gpu, bytes)?, bytes };
        Ok(Self { element, dims: dims.into(), count, storage, writers: RwLock::default() })
    }

    /// A tensor with a copy of `values`.
    pub fn from_slice<T: Scalar>(dims: &[i64], values: &[T]) -> Result<Self> {
        let count = element_count(T::TYPE, dims)?;
        if count != values.len() {
            return Err(Error::invalid(
                "values",
                format!("{} values given, but dims {dims:?} hold {count}", values.len()),
            ));
        }
        // SAFETY: a scalar is plain numbers, all of whose bytes are defined.
        let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) };
        Self::from_bytes(T::TYPE, dims, bytes)
    }

    /// A tensor with a copy of bytes: its numbers one after the other, as they are in memory.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for a tensor of strings, and if there are more or fewer bytes than the tensor has. CAPACITY if there is no
    /// memory.
    pub fn from_bytes(element: ElementType, dims: &[i64], bytes: &[u8]) -> Result<Self> {
        if element == ElementType::String {
            return Err(Error::invalid("type", "strings are not one after the other in memory: give a list of them"));
        }
        let (count, needed) = size_of_tensor(element, dims)?;
        if needed != bytes.len() {
            let message = format!("{} bytes given, but dims {dims:?} of {} take {needed}", bytes.len(), element.name());
            return Err(Error::invalid("bytes", message));
        }
        let buffer = Buffer::copy_of(bytes)?;
        let storage = Storage::Numbers { data: buffer.data, bytes: needed, _owner: Box::new(buffer) };
        Ok(Self { element, dims: dims.into(), count, storage, writers: RwLock::default() })
    }

    /// A tensor of truth values.
    pub fn from_bools(dims: &[i64], values: &[bool]) -> Result<Self> {
        let bytes = Self::from_slice(dims, &values.iter().map(|&value| u8::from(value)).collect::<Vec<_>>())?;
        Ok(Self { element: ElementType::Bool, ..bytes })
    }

    /// A tensor of texts.
    pub fn from_strings(dims: &[i64], values: Vec<String>) -> Result<Self> {
        let (count, _) = size_of_tensor(ElementType::String, dims)?;
        if count != values.len() {
            return Err(Error::invalid(
                "values",
                format!("{} strings given, but dims {dims:?} hold {count}", values.len()),
            ));
        }
        let storage = Storage::Strings(values.into());
        Ok(Self { element: ElementType::String, dims: dims.into(), count, storage, writers: RwLock::default() })
    }

    /// A tensor over borrowed memory. `owner` is dropped when the tensor is no longer in use.
    ///
    /// # Safety
    /// `data` points to `bytes` bytes that stay valid until `owner` is dropped. Nothing else writes to them while a run
    /// uses them.
    pub unsafe fn from_memory(
        element: ElementType,
        dims: &[i64],
        data: *mut c_void,
        bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        let (count, data, bytes) = check_memory(element, dims, data, bytes)?;
        let storage = Storage::Numbers { data, bytes, _owner: owner };
        Ok(Self { element, dims: dims.into(), count, storage, writers: RwLock::default() })
    }

    /// The type of the elements.
    pub fn element_type(&self) -> ElementType {
        self.element
    }

    /// The dimensions.
    pub fn dims(&self) -> &[i64] {
        &self.dims
    }

    /// How many elements there are.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The GPU it is on, if it is on one.
    pub fn device(&self) -> Option<u32> {
        match &self.storage {
            Storage::Device { memory, .. } => Some(memory.gpu().ordinal() as u32),
            Storage::Pinned { memory, .. } => Some(memory.gpu().ordinal() as u32),
            Storage::Numbers { .. } | Storage::Strings(_) => None,
        }
    }

    /// The memory of a tensor of numbers in host memory: where it begins and how many bytes it has.
    pub fn memory(&self) -> Result<(*mut c_void, usize)> {
        match &self.storage {
            Storage::Device { memory, .. } => {
                let message = format!("this tensor is on GPU {}, not in host memory", memory.gpu().ordinal());
                Err(Error::new(Status::Unsupported, format!("{message}: copy what you need from it")))
            }
            _ => self.place(),
        }
    }

    /// As [`memory`](Self::memory), on any device.
    pub(crate) fn place(&self) -> Result<(*mut c_void, usize)> {
        match &self.storage {
            Storage::Numbers { data, bytes, .. } => Ok((data.as_ptr(), *bytes)),
            Storage::Device { memory, at, bytes } => {
                Ok((std::ptr::without_provenance_mut(memory.address() as usize + at), *bytes))
            }
            Storage::Pinned { memory, bytes } => Ok((memory.data().cast(), *bytes)),
            Storage::Strings(_) => Err(Error::new(
                Status::Unsupported,
                "a tensor of strings has no flat memory: read its elements one by one as strings",
            )),
        }
    }

    /// Copies bytes out of a tensor of numbers, wherever it is, from the byte `from` on.
    ///
    /// # Safety
    /// No run writes there meanwhile.
    pub unsafe fn copy_out(&self, from: usize, to: &mut [u8]) -> Result<()> {
        self.check_inside(from, to.len())?;
        if let Storage::Device { memory, at, .. } = &self.storage {
            // SAFETY: the caller's.
            return Ok(unsafe { memory.read(at + from, to) }?);
        }
        let at = self.memory()?.0.cast::<u8>().wrapping_add(from);
        // SAFETY: inside the memory, by the check above; by contract nothing writes there.
        unsafe { std::ptr::copy_nonoverlapping(at, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    /// Copies bytes into a tensor of numbers, wherever it is, from the byte `to` on.
    ///
    /// # Safety
    /// Nothing else reads or writes there meanwhile.
    pub unsafe fn copy_in(&self, to: usize, from: &[u8]) -> Result<()> {
        self.check_inside(to, from.len())?;
        if let Storage::Device { memory, at, .. } = &self.storage {
            // SAFETY: the caller's.
            return Ok(unsafe { memory.write(at + to, from) }?);
        }
        let at = self.memory()?.0.cast::<u8>().wrapping_add(to);
        // SAFETY: inside the memory, by the check above; by contract nothing else reads or writes there.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), at, from.len()) };
        Ok(())
    }

    fn check_inside(&self, at: usize, len: usize) -> Result<()> {
        let bytes = self.place()?.1;
        if at.checked_add(len).is_none_or(|end| end > bytes) {
            return Err(Error::invalid("bytes", format!("{len} bytes at {at} of a tensor of {bytes}")));
        }
        Ok(())
    }

    /// A shared lock, for a caller that writes a part of its own.
    pub(crate) fn hold_part(&self) -> RwLockReadGuard<'_, ()> {
        self.writers.read()
    }

    /// An exclusive lock, for a caller that writes all of it.
    pub(crate) fn hold_whole(&self) -> RwLockWriteGuard<'_, ()> {
        self.writers.write()
    }

    /// The elements.
    pub fn as_slice<T: Scalar>(&self) -> Result<&[T]> {
        let data = self.typed::<T>()?;
        // SAFETY: `typed` checked the type and the alignment, and the memory holds `count` elements.
        Ok(unsafe { std::slice::from_raw_parts(data, self.count) })
    }

    /// The elements, to be written.
    pub fn as_mut_slice<T: Scalar>(&mut self) -> Result<&mut [T]> {
        let data = self.typed::<T>()?;
        // SAFETY: as above, and `&mut self` is the only access.
        Ok(unsafe { std::slice::from_raw_parts_mut(data, self.count) })
    }

    /// The elements of a tensor of truth values.
    pub fn to_bools(&self) -> Result<Vec<bool>> {
        if self.element != ElementType::Bool {
            let message = format!("this is a tensor of {}, not of truth values", self.element.name());
            return Err(Error::new(Status::InvalidArgument, message));
        }
        let (data, bytes) = self.memory()?;
        // SAFETY: the memory has that many bytes. They are not taken for `bool`s, of which only two values exist.
        let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), bytes) };
        Ok(bytes.iter().map(|&byte| byte != 0).collect())
    }

    /// The elements of a tensor of strings.
    pub fn as_strings(&self) -> Result<&[String]> {
        match &self.storage {
            Storage::Strings(strings) => Ok(strings),
            Storage::Numbers { .. } | Storage::Device { .. } | Storage::Pinned { .. } => Err(Error::new(
                Status::InvalidArgument,
                format!("this is a tensor of {}, not of strings", self.element.name()),
            )),
        }
    }

    fn typed<T: Scalar>(&self) -> Result<*mut T> {
        if T::TYPE != self.element {
            return Err(Error::new(
                Status::InvalidArgument,
                format!("this is a tensor of {}, not of {}", self.element.name(), T::TYPE.name()),
            ));
        }
        let (data, _) = self.memory()?;
        Ok(data.cast())
    }
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tensor({} {:?})", self.element.name(), self.dims)
    }
}

/// Memory of our own.
struct Buffer {
    /// The first aligned address of what was allocated.
    data: NonNull<c_void>,
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: an allocation belongs to no thread.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    fn zeroed(bytes: usize) -> Result<Self> {
        Self::allocated(bytes, alloc_zeroed)
    }

    fn copy_of(bytes: &[u8]) -> Result<Self> {
        let buffer = Self::allocated(bytes.len(), alloc)?;
        // SAFETY: the buffer is new and has as many bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.data.as_ptr().cast(), bytes.len()) };
        Ok(buffer)
    }

    /// `allocate` takes a layout whose size is not 0, and returns memory for it or NULL.
    fn allocated(bytes: usize, allocate: unsafe fn(Layout) -> *mut u8) -> Result<Self> {
        // An empty tensor gets a real address too: for callers and ONNX Runtime NULL means "no memory". Aligned by
        // hand: for aligned zeros the allocator has only a slow path that writes all bytes. Without alignment large
        // blocks come as zero pages from the system, and a pool takes physical memory only as it is used.
        let size = bytes.max(1).checked_add(ALIGNMENT - 1).ok_or_else(|| too_large(bytes))?;
        let layout = Layout::from_size_align(size, 1).map_err(|_| too_large(bytes))?;
        // SAFETY: the layout's size is not 0.
        let base = NonNull::new(unsafe { allocate(layout) }).ok_or_else(|| too_large(bytes))?;
        let offset = base.addr().get().next_multiple_of(ALIGNMENT) - base.addr().get();
        // SAFETY: less than the alignment, by which more was allocated than is needed.
        let data = unsafe { base.add(offset) }.cast();
        Ok(Self { data, base, layout })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `allocated` with this layout, freed once.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

fn too_large(bytes: usize) -> Error {
    Error::new(Status::Capacity, format!("no memory for a tensor of {bytes} bytes")).about("dims")
}

/// How many elements a tensor with these dimensions has, if there can be one.
pub(crate) fn element_count(element: ElementType, dims: &[i64]) -> Result<usize> {
    size_of_tensor(element, dims).map(|(count, _)| count)
}

/// Elements and bytes of a tensor.
fn size_of_tensor(element: ElementType, dims: &[i64]) -> Result<(usize, usize)> {
    let mut count = 1_usize;
    for (axis, &dim) in dims.iter().enumerate() {
        let size = usize::try_from(dim).map_err(|_| {
            Error::invalid(format!("dims[{axis}]"), format!("{dim} is negative; a tensor's shape is whole"))
        })?;
        // A zero dimension makes the tensor empty but must not hide an overflow of the others.
        count = count
            .checked_mul(size.max(1))
            .filter(|&count| count <= isize::MAX as usize)
            .ok_or_else(|| Error::invalid("dims", format!("{dims:?} hold more elements than memory can")))?;
    }
    if dims.contains(&0) {
        count = 0;
    }
    // What a string takes beside its text.
    let bits = if element == ElementType::String { 8 * size_of::<String>() } else { element.bits() };
    let bytes =
        count.checked_mul(bits).map(|bits| bits.div_ceil(8)).filter(|&bytes| bytes <= isize::MAX as usize).ok_or_else(
            || Error::invalid("dims", format!("{dims:?} of {} take more bytes than memory has", element.name())),
        )?;
    Ok((count, bytes))
}

fn check_memory(
    element: ElementType,
    dims: &[i64],
    data: *mut c_void,
    bytes: usize,
) -> Result<(usize, NonNull<c_void>, usize)> {
    if element == ElementType::String {
        return Err(Error::invalid(
            "type",
            "strings can not be borrowed: make a tensor of strings with a copy of them",
        ));
    }
    let (count, needed) = size_of_tensor(element, dims)?;
    if bytes < needed {
        return Err(Error::invalid(
            "bytes",
            format!("{bytes} bytes are too few: dims {dims:?} of {} take {needed}", element.name()),
        ));
    }
    let alignment = (element.bits() / 8).clamp(1, 8);
    if !data.addr().is_multiple_of(alignment) {
        return Err(Error::invalid(
            "data",
            format!("address {data:p} is not a multiple of {alignment}, which {} needs", element.name()),
        ));
    }
    match NonNull::new(data) {
        Some(data) => Ok((count, data, needed)),
        None if needed == 0 => Ok((count, NonNull::<u128>::dangling().cast(), 0)),
        None => Err(Error::invalid("data", format!("NULL, but dims {dims:?} take {needed} bytes"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_all_types() {
        for &element in ElementType::ALL {
            assert_eq!(ElementType::from_number(element as i32), Some(element));
            let tensor = Tensor::zeros(element, &[3, 5]).unwrap();
            assert_eq!(tensor.len(), 15);
            if element != ElementType::String {
                assert_eq!(tensor.memory().unwrap().1, (15 * element.bits()).div_ceil(8), "{element:?}");
            }
        }
        assert_eq!(ElementType::from_number(0), None);
        assert_eq!(ElementType::from_number(27), None);
    }

    #[test]
    fn impossible_shapes_are_refused() {
        for (dims, argument) in [
            (vec![2, -1], "dims[1]"),
            (vec![i64::MAX, 2], "dims"),
            (vec![i64::MAX, 2, 0], "dims"),
            (vec![1 << 40, 1 << 40], "dims"),
            (vec![i64::MAX / 4], "dims"),
        ] {
            let error = Tensor::zeros(ElementType::F32, &dims).unwrap_err();
            assert_eq!(error.argument(), Some(argument), "{dims:?}: {error}");
        }
        // Miri ends at an allocation that fails.
        if !cfg!(miri) {
            let error = Tensor::zeros(ElementType::String, &[1 << 50]).unwrap_err();
            assert_eq!((error.status(), error.argument()), (Status::Capacity, Some("dims")), "{error}");
        }
    }

    #[test]
    fn bytes_of_numbers_become_a_tensor() {
        let bytes: Vec<u8> = [1.5_f32, -2.0].iter().flat_map(|number| number.to_le_bytes()).collect();
        let tensor = Tensor::from_bytes(ElementType::F32, &[2, 1], &bytes).unwrap();
        assert_eq!(tensor.as_slice::<f32>().unwrap(), [1.5, -2.0]);
        assert!(tensor.memory().unwrap().0.addr().is_multiple_of(ALIGNMENT));
        let packed = Tensor::from_bytes(ElementType::U4, &[3], &[0x21, 0x03]).unwrap();
        assert_eq!((packed.len(), packed.memory().unwrap().1), (3, 2));
        let error = Tensor::from_bytes(ElementType::F32, &[2, 1], &bytes[1..]).unwrap_err();
        assert_eq!(error.argument(), Some("bytes"));
        assert!(error.message().contains("7 bytes given, but dims [2, 1] of f32 take 8"), "{error}");
        let error = Tensor::from_bytes(ElementType::String, &[0], &[]).unwrap_err();
        assert_eq!((error.status(), error.argument()), (Status::InvalidArgument, Some("type")));
    }

    #[test]
    fn a_scalar_and_an_empty_tensor() {
        assert_eq!(Tensor::zeros(ElementType::F32, &[]).unwrap().as_slice::<f32>().unwrap(), [0.0]);
        assert!(Tensor::zeros(ElementType::F32, &[4, 0]).unwrap().as_slice::<f32>().unwrap().is_empty());
    }

    #[test]
    fn truth_values_go_in_and_come_out() {
        let tensor = Tensor::from_bools(&[3], &[true, false, true]).unwrap();
        assert_eq!(tensor.element_type(), ElementType::Bool);
        assert_eq!(tensor.to_bools().unwrap(), [true, false, true]);
        assert!(Tensor::from_slice(&[1], &[1_u8]).unwrap().to_bools().is_err());
    }

    #[test]
    fn bytes_are_copied_out_and_in() {
        let tensor = Tensor::from_slice(&[4], &[1_u8, 2, 3, 4]).unwrap();
        let mut bytes = [0; 2];
        // SAFETY: nothing else has the tensor.
        unsafe {
            tensor.copy_in(1, &[8, 9]).unwrap();
            tensor.copy_out(2, &mut bytes).unwrap();
            assert!(tensor.copy_out(3, &mut bytes).is_err() && tensor.copy_in(usize::MAX, &[0, 0]).is_err());
        }
        assert_eq!((tensor.as_slice::<u8>().unwrap(), bytes), (&[1, 8, 9, 4][..], [9, 3 + 1]));
        assert_eq!(tensor.device(), None);
    }

    #[test]
    fn the_wrong_type_is_refused() {
        let tensor = Tensor::from_slice(&[2], &[1_i32, 2]).unwrap();
        assert!(tensor.as_slice::<f32>().is_err());
        assert!(tensor.as_strings().is_err());
        assert!(Tensor::from_slice(&[3], &[1_i32, 2]).is_err());
    }

    #[test]
    fn borrowed_memory_is_given_back_once() {
        let owner = Arc::new(());
        let mut values = [1.0_f32, 2.0];
        // SAFETY: `values` outlives the tensor.
        let tensor = unsafe {
            Tensor::from_memory(ElementType::F32, &[2], values.as_mut_ptr().cast(), 8, Box::new(Arc::clone(&owner)))
        };
        let tensor = tensor.unwrap();
        assert_eq!(tensor.as_slice::<f32>().unwrap(), [1.0, 2.0]);
        assert_eq!(Arc::strong_count(&owner), 2);
        drop(tensor);
        assert_eq!(Arc::strong_count(&owner), 1);
    }

    #[test]
    fn memory_that_does_not_fit_is_refused() {
        let mut values = [0_u64; 2];
        let data: *mut c_void = values.as_mut_ptr().cast();
        for (element, data, bytes, argument) in [
            (ElementType::F32, data, 15, "bytes"),
            (ElementType::F32, data.wrapping_byte_add(1), 16, "data"),
            (ElementType::F32, std::ptr::null_mut(), 16, "data"),
            (ElementType::String, data, 16, "type"),
        ] {
            // SAFETY: refused, or over `values` which outlives the tensor.
            let error = unsafe { Tensor::from_memory(element, &[4], data, bytes, Box::new(())) }.unwrap_err();
            assert_eq!(error.argument(), Some(argument));
        }
    }
}
