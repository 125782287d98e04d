//! Reading arguments: every one is checked before anything is done, and every error names it.

use std::ffi::{CStr, CString, c_char};
use std::mem::MaybeUninit;

use crate::error::{Error, Result, Status};
use crate::kv::Owner;

/// More dimensions than any model has: a larger rank is a mistake, and reading that many would run off the array.
const MAX_RANK: usize = 64;
/// More than any model has inputs or outputs, for the same reason.
const MAX_VALUES: usize = 1 << 16;
/// More users, owners or sessions than are asked about at once, and more items than any history has.
const MAX_USERS: usize = 1 << 20;
const MAX_ITEMS: usize = 1 << 28;
/// A `struct_size` beyond this is garbage, not a later version of the struct.
const MAX_STRUCT: usize = 4096;

/// Where a result goes. Nothing is written before the call has succeeded.
///
/// # Safety
/// `pointer` is NULL or may be written to.
pub(super) unsafe fn out<'a, T>(pointer: *mut T, argument: &str) -> Result<&'a mut MaybeUninit<T>> {
    // SAFETY: by contract; a `MaybeUninit` may hold anything.
    unsafe { pointer.cast::<MaybeUninit<T>>().as_mut() }
        .ok_or_else(|| Error::invalid(argument, "NULL, where the result is to be written"))
}

/// Writes a text to a caller's buffer, and its length with the NUL at the end; to a buffer that is NULL, with a
/// capacity of 0, the length alone.
///
/// # Safety
/// `buffer` is NULL or has room for `capacity` bytes; `length` is NULL or may be written to.
pub(super) unsafe fn write_text(
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
    text: impl FnOnce() -> CString,
) -> Result<()> {
    // SAFETY: by contract.
    let out_length = unsafe { out(length, "length")? };
    if buffer.is_null() && capacity > 0 {
        return Err(Error::invalid("buffer", format!("NULL, where {capacity} bytes are announced")));
    }
    let text = text();
    let needed = text.as_bytes_with_nul().len();
    if !buffer.is_null() {
        if capacity < needed {
            let message = format!("{capacity} bytes are too few for a text of {needed}");
            return Err(Error::new(Status::Capacity, message).about("capacity"));
        }
        // SAFETY: the text has so many bytes, and the buffer room for them.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), buffer, needed) };
    }
    out_length.write(needed);
    Ok(())
}

/// Writes tokens to a caller's list, and their number; to a list that is NULL, with a capacity of 0, the number alone.
///
/// # Safety
/// `tokens` is NULL or has room for `capacity` elements; `count` is NULL or may be written to.
pub(super) unsafe fn write_tokens(
    tokens: *mut u32,
    capacity: usize,
    count: *mut usize,
    made: impl FnOnce() -> Result<Vec<u32>>,
) -> Result<()> {
    // SAFETY: by contract.
    let (out_count, room) = unsafe { (out(count, "count")?, out_list(tokens, capacity, "tokens")?) };
    if room.is_none() && capacity > 0 {
        return Err(Error::invalid("tokens", format!("NULL, where {capacity} elements are announced")));
    }
    let made = made()?;
    if let Some(room) = room {
        if capacity < made.len() {
            let message = format!("{capacity} elements are too few for {} tokens", made.len());
            return Err(Error::new(Status::Capacity, message).about("capacity"));
        }
        for (room, &token) in room.iter_mut().zip(&made) {
            room.write(token);
        }
    }
    out_count.write(made.len());
    Ok(())
}

/// A text.
///
/// # Safety
/// `pointer` is NULL or a C string that lives as long as the result is used.
pub(super) unsafe fn text<'a>(pointer: *const c_char, argument: impl Into<String>) -> Result<&'a str> {
    if pointer.is_null() {
        return Err(Error::invalid(argument, "NULL, where a text is needed"));
    }
    // SAFETY: by contract.
    utf8(unsafe { CStr::from_ptr(pointer) }.to_bytes(), argument)
}

/// A text of so many bytes.
///
/// # Safety
/// `pointer` is NULL or has `length` bytes that live as long as the result is used.
pub(super) unsafe fn text_of_length<'a>(pointer: *const c_char, length: usize, argument: String) -> Result<&'a str> {
    // SAFETY: by contract.
    let bytes = unsafe { slice(pointer.cast::<u8>(), length, &argument)? };
    utf8(bytes, argument)
}

fn utf8(bytes: &[u8], argument: impl Into<String>) -> Result<&str> {
    std::str::from_utf8(bytes).map_err(|error| {
        Error::invalid(argument, format!("the text is not UTF-8 after its first {} bytes", error.valid_up_to()))
    })
}

/// A text that may be left out.
///
/// # Safety
/// As for [`text`].
pub(super) unsafe fn optional_text<'a>(pointer: *const c_char, argument: &str) -> Result<Option<&'a str>> {
    // SAFETY: by contract.
    let given = if pointer.is_null() { None } else { Some(unsafe { text(pointer, argument) }?) };
    if given == Some("") {
        return Err(Error::invalid(argument, "an empty text; pass NULL to leave it out"));
    }
    Ok(given)
}

/// The dimensions of a tensor.
///
/// # Safety
/// `dims` is NULL or has `rank` elements.
pub(super) unsafe fn dims<'a>(dims: *const i64, rank: usize) -> Result<&'a [i64]> {
    if rank > MAX_RANK {
        return Err(Error::invalid("rank", format!("{rank} dimensions are more than the {MAX_RANK} there can be")));
    }
    // SAFETY: by contract.
    unsafe { slice(dims, rank, "dims") }
}

/// A list with one element for each input or output.
///
/// # Safety
/// `values` is NULL or has `count` elements.
pub(super) unsafe fn values<'a, T>(values: *const T, count: usize, argument: &str, counted: &str) -> Result<&'a [T]> {
    at_most(count, MAX_VALUES, counted)?;
    // SAFETY: by contract.
    unsafe { slice(values, count, argument) }
}

/// A list of users.
///
/// # Safety
/// `users` is NULL or has `count` elements.
pub(super) unsafe fn users<'a>(users: *const u64, count: usize) -> Result<&'a [u64]> {
    at_most(count, MAX_USERS, "user_count")?;
    // SAFETY: by contract.
    unsafe { slice(users, count, "users") }
}

/// A list of owners.
///
/// # Safety
/// `owners` is NULL or has `count` elements.
pub(super) unsafe fn owners<'a>(owners: *const u64, count: usize) -> Result<&'a [Owner]> {
    at_most(count, MAX_USERS, "owner_count")?;
    // SAFETY: by contract.
    unsafe { slice(owners, count, "owners") }.map(Owner::slice)
}

/// The items of a history.
///
/// # Safety
/// `items` is NULL or has `count` elements.
pub(super) unsafe fn items<'a>(items: *const u64, count: usize, request: &str) -> Result<&'a [u64]> {
    at_most(count, MAX_ITEMS, &format!("{request}.item_count"))?;
    // SAFETY: by contract.
    unsafe { slice(items, count, &format!("{request}.items")) }
}

/// The tokens of a text.
///
/// # Safety
/// `tokens` is NULL or has `count` elements.
pub(super) unsafe fn tokens<'a>(tokens: *const u32, count: usize) -> Result<&'a [u32]> {
    at_most(count, MAX_ITEMS, "token_count")?;
    // SAFETY: by contract.
    unsafe { slice(tokens, count, "tokens") }
}

/// A list of sessions.
///
/// # Safety
/// `sessions` is NULL or has `count` elements, each NULL or a C string.
pub(super) unsafe fn sessions<'a>(sessions: *const *const c_char, count: usize) -> Result<Vec<&'a str>> {
    at_most(count, MAX_USERS, "session_count")?;
    // SAFETY: by contract.
    unsafe { each_text(slice(sessions, count, "sessions")?, "sessions") }
}

/// A list of texts.
///
/// # Safety
/// `texts` is NULL or has `count` elements, each NULL or a C string.
pub(super) unsafe fn texts<'a>(
    texts: *const *const c_char,
    count: usize,
    argument: &str,
    counted: &str,
) -> Result<Vec<&'a str>> {
    // SAFETY: by contract.
    unsafe { each_text(values(texts, count, argument, counted)?, argument) }
}

/// # Safety
/// Each of `texts` is NULL or a C string.
unsafe fn each_text<'a>(texts: &[*const c_char], argument: &str) -> Result<Vec<&'a str>> {
    // SAFETY: by contract.
    let read = |(index, &pointer)| unsafe { text(pointer, format!("{argument}[{index}]")) };
    texts.iter().enumerate().map(read).collect()
}

fn at_most(count: usize, most: usize, counted: &str) -> Result<()> {
    if count > most {
        return Err(Error::invalid(counted, format!("{count} are more than the {most} there can be")));
    }
    Ok(())
}

/// A number that must not be negative.
pub(super) fn count(value: i32, argument: &str) -> Result<u32> {
    u32::try_from(value).map_err(|_| Error::invalid(argument, format!("{value} is negative")))
}

/// A truth value.
pub(super) fn flag(value: i32, argument: &str) -> Result<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Error::invalid(argument, format!("{other} is neither 0 nor 1"))),
    }
}

/// The error of a number that has no meaning.
pub(super) fn unknown(argument: &str, value: i32, names: &str) -> Error {
    Error::invalid(argument, format!("{value} is none of the {names} numbers"))
}

/// An error about `part`, said of that part of an argument: "layers" becomes "options.layers".
pub(super) fn within(argument: &str, error: Error) -> Error {
    match error.argument() {
        Some(part) => {
            let named = format!("{argument}.{part}");
            error.about(named)
        }
        None => error,
    }
}

/// An error about a file or a text that an argument names, said of that argument; the message has the rest.
pub(super) fn all_about(argument: &str, error: &Error) -> Error {
    Error::new(error.status(), error.to_string()).about(argument)
}

/// Where a list of results goes, if it is wanted. Nothing is written before the call has succeeded.
///
/// # Safety
/// `pointer` is NULL or has room for `count` elements.
pub(super) unsafe fn out_list<'a, T>(
    pointer: *mut T,
    count: usize,
    argument: &str,
) -> Result<Option<&'a mut [MaybeUninit<T>]>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: by contract; a `MaybeUninit` may hold anything, so the elements can be looked at as such.
    let checked = unsafe { slice(pointer.cast::<MaybeUninit<T>>(), count, argument)? };
    // SAFETY: by contract they may be written to, and nothing else refers to them during the call.
    Ok(Some(unsafe { std::slice::from_raw_parts_mut(pointer.cast(), checked.len()) }))
}

/// An array.
///
/// # Safety
/// `values` is NULL or has `count` elements.
pub(super) unsafe fn slice<'a, T>(values: *const T, count: usize, argument: &str) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if values.is_null() {
        return Err(Error::invalid(argument, format!("NULL, where {count} elements are needed")));
    }
    if !values.is_aligned() {
        let message = format!("address {values:p} is not a multiple of {}, which its elements need", align_of::<T>());
        return Err(Error::invalid(argument, message));
    }
    if count.checked_mul(size_of::<T>()).is_none_or(|bytes| bytes > isize::MAX as usize) {
        return Err(Error::invalid(argument, format!("{count} elements are more than memory can hold")));
    }
    // SAFETY: by contract.
    Ok(unsafe { std::slice::from_raw_parts(values, count) })
}

/// A struct of the header whose first field, a `uint32_t`, is its size as the caller knows it. It only ever grows at
/// the end, so callers built with an older or a newer header are understood.
///
/// # Safety
/// The struct is `repr(C)`, begins with that `u32`, and any bytes are a value of it.
pub(super) unsafe trait Versioned: Copy {
    /// Its size in the first version of the header; it never changes.
    const FIRST_SIZE: usize;
}

/// An option struct: what the caller knows of it, over the defaults.
///
/// # Safety
/// `pointer` is NULL (the defaults) or points to a struct of the size that it says.
pub(super) unsafe fn options<T: Versioned>(pointer: *const T, defaults: T, argument: &str) -> Result<T> {
    if pointer.is_null() {
        return Ok(defaults);
    }
    // SAFETY: by contract.
    let size = unsafe { struct_size(pointer, argument) }?;
    let known = size.min(size_of::<T>());
    let mut options = defaults;
    // SAFETY: `size` bytes can be read; no more than `T` has are written.
    let unknown = unsafe {
        std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), (&raw mut options).cast::<u8>(), known);
        std::slice::from_raw_parts(pointer.cast::<u8>().add(known), size - known)
    };
    // A later version of the struct is fine as long as what we do not know of is not used.
    if unknown.iter().any(|&byte| byte != 0) {
        let message =
            format!("it has fields set beyond the {known} bytes that this libpagoda.so knows: use a newer one");
        return Err(Error::new(Status::Unsupported, message).about(argument));
    }
    Ok(options)
}

/// An array of structs. They lie as far apart as the caller's struct is long, which the first one says and the others
/// repeat.
///
/// # Safety
/// `pointer` is NULL or points to `count` structs of the size that they say.
pub(super) unsafe fn structs<T: Versioned>(
    pointer: *const T,
    count: usize,
    defaults: T,
    argument: &str,
    counted: &str,
) -> Result<Vec<T>> {
    at_most(count, MAX_VALUES, counted)?;
    if pointer.is_null() && count > 0 {
        return Err(Error::invalid(argument, format!("NULL, where {count} elements are needed")));
    }
    let mut first = 0;
    let read = |index: usize| {
        let name = format!("{argument}[{index}]");
        // SAFETY: by contract; the elements before this one had the size of the first.
        let element = unsafe { pointer.byte_add(index * first) };
        // SAFETY: as above.
        let size = unsafe { struct_size(element, &name) }?;
        if index == 0 {
            first = size;
        } else if size != first {
            let message = format!("{size}, where the first element says {first}: all must have the same size");
            return Err(Error::invalid(format!("{name}.struct_size"), message));
        }
        // SAFETY: as above.
        unsafe { options(element, defaults, &name) }
    };
    (0..count).map(read).collect()
}

/// Where a struct goes. Nothing is written before the call has succeeded.
pub(super) struct OutStruct<T> {
    pointer: *mut T,
    size: usize,
}

/// Where a struct that the caller has room for is to be written.
///
/// # Safety
/// `pointer` is NULL or points to a struct of the size that it says, which may be written to.
pub(super) unsafe fn out_struct<T: Versioned>(pointer: *mut T, argument: &str) -> Result<OutStruct<T>> {
    if pointer.is_null() {
        return Err(Error::invalid(argument, "NULL, where the result is to be written"));
    }
    // SAFETY: by contract.
    let size = unsafe { struct_size(pointer, argument) }?;
    Ok(OutStruct { pointer, size })
}

impl<T: Versioned> OutStruct<T> {
    /// Writes as much of `value` as the caller knows of, all but `struct_size`.
    pub(super) fn write(self, value: &T) {
        let from = std::ptr::from_ref(value).cast::<u8>();
        let known = self.size.min(size_of::<T>());
        let skip = size_of::<u32>();
        // SAFETY: the caller's struct has `size` bytes, ours `size_of::<T>()`.
        unsafe { std::ptr::copy_nonoverlapping(from.add(skip), self.pointer.cast::<u8>().add(skip), known - skip) };
    }
}

/// # Safety
/// `pointer` may be read as a `u32`.
unsafe fn struct_size<T: Versioned>(pointer: *const T, argument: &str) -> Result<usize> {
    // SAFETY: by contract; a caller's struct may lie anyhow.
    let size = unsafe { pointer.cast::<u32>().read_unaligned() } as usize;
    // A size that the struct never had would end within a field.
    if size < T::FIRST_SIZE || size > MAX_STRUCT || !size.is_multiple_of(align_of::<T>()) {
        return Err(Error::invalid(
            format!("{argument}.struct_size"),
            format!("{size} is not the size of this struct ({}): start from its PAGODA_..._INIT", size_of::<T>()),
        ));
    }
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A struct that has grown by its last field since the first version.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Grown {
        struct_size: u32,
        old: u32,
        new: u32,
    }

    // SAFETY: numbers in C's layout, the size first.
    unsafe impl Versioned for Grown {
        const FIRST_SIZE: usize = 8;
    }

    const DEFAULTS: Grown = Grown { struct_size: 12, old: 1, new: 2 };

    #[test]
    fn an_older_caller_gets_defaults_for_what_it_does_not_know() {
        let given = Grown { struct_size: 8, old: 7, new: 9 };
        // SAFETY: `given` has at least the 8 bytes it says.
        let read = unsafe { options(&raw const given, DEFAULTS, "options") }.unwrap();
        assert_eq!((read.old, read.new), (7, 2));
    }

    #[test]
    fn a_size_that_ends_within_a_field_is_refused() {
        for size in [9, 10, 11, 13] {
            let given = [size, 7, 9, 0];
            // SAFETY: `given` has the bytes it says, and more.
            let error = unsafe { options(given.as_ptr().cast(), DEFAULTS, "options") }.unwrap_err();
            assert_eq!(error.argument(), Some("options.struct_size"), "{size}");
        }
    }

    #[test]
    fn a_newer_caller_is_fine_until_it_uses_what_is_new() {
        let mut given = [16_u32, 7, 9, 0];
        // SAFETY: `given` has the 16 bytes it says.
        let read = unsafe { options(given.as_ptr().cast(), DEFAULTS, "options") }.unwrap();
        assert_eq!((read.old, read.new), (7, 9));
        given[3] = 1;
        // SAFETY: as above.
        let error = unsafe { options(given.as_ptr().cast(), DEFAULTS, "options") }.unwrap_err();
        assert_eq!(error.status(), Status::Unsupported);
    }

    #[test]
    fn an_array_is_stepped_through_by_the_size_that_its_first_element_says() {
        let mut given = [16_u32, 7, 9, 0, 16, 8, 10, 0];
        // SAFETY: `given` has two structs of the 16 bytes they say.
        let read = |given: &[u32]| unsafe { structs(given.as_ptr().cast(), 2, DEFAULTS, "all", "count") };
        assert_eq!(
            read(&given).unwrap().iter().map(|read| (read.old, read.new)).collect::<Vec<_>>(),
            [(7, 9), (8, 10)]
        );
        let older = [8_u32, 7, 8, 8];
        assert_eq!(read(&older).unwrap().iter().map(|read| (read.old, read.new)).collect::<Vec<_>>(), [(7, 2), (8, 2)]);
        given[4] = 12;
        assert_eq!(read(&given).unwrap_err().argument(), Some("all[1].struct_size"));
    }

    #[test]
    fn a_result_stops_where_the_caller_stops() {
        let mut room = Grown { struct_size: 8, old: 0, new: 0 };
        // SAFETY: `room` has at least the 8 bytes it says.
        unsafe { out_struct(&raw mut room, "info") }.unwrap().write(&DEFAULTS);
        assert_eq!(room, Grown { struct_size: 8, old: 1, new: 0 });
    }
}
