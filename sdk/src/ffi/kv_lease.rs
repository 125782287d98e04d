//! `pagoda_kv_lease`: a batch's hold on its owners' histories, from prepare to commit.

use std::sync::Arc;

use super::args::{self, Versioned};
use super::error::{pagoda_error, pagoda_status};
use super::handle::{Kind, Object, Table};
use super::kv::pagoda_kv_cache;
use super::tensor::pagoda_tensor;
use super::{boundary, freeing};
use crate::error::{Error, Result};
use crate::kv::{KvCache, KvLease, KvRequest, Owner};
use crate::sync::{RwLock, RwLockReadGuard};
use crate::tensor::Tensor;

/// An index tensor of a lease: the input of the same name of the ai.pagoda operators.
pub type pagoda_kv_tensor = i32;

/// The offset of the first row of each owner: i32 [owners + 1].
pub const PAGODA_KV_TENSOR_ROW_OFFSETS: pagoda_kv_tensor = 0;
/// The number of candidates of each owner: i32 [owners].
pub const PAGODA_KV_TENSOR_NUM_CANDIDATES: pagoda_kv_tensor = 1;
/// The number of cached tokens of each owner: i32 [owners].
pub const PAGODA_KV_TENSOR_CACHED_LEN: pagoda_kv_tensor = 2;
/// The offset of each owner in the list of pages: i32 [owners + 1].
pub const PAGODA_KV_TENSOR_PAGE_INDPTR: pagoda_kv_tensor = 3;
/// The pages of all owners, each owner's in order of position: i32.
pub const PAGODA_KV_TENSOR_PAGE_IDS: pagoda_kv_tensor = 4;

/// Holds the owners of a batch in the pool, with room for their new tokens. It ends with a commit or an abort.
pub struct pagoda_kv_lease {
    _private: [u8; 0],
}

/// What a batch has of one owner. Start from PAGODA_KV_REQUEST_INIT, which sets `struct_size`. All elements of an array
/// must have the same `struct_size`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_kv_request {
    /// The size of this struct.
    pub struct_size: u32,
    /// The number of new tokens.
    pub tokens: i32,
    /// The number of candidates after the new tokens.
    pub candidates: i32,
    /// The owner.
    pub owner: u64,
    /// The position of the first new token in the history of the owner.
    pub start: i64,
    /// The items of the history up to the last new token, if the cache checks them (`edited`): those of all new tokens,
    /// and of as many tokens before them as are to be checked. Else NULL.
    pub items: *const u64,
    /// The number of items.
    pub item_count: usize,
}

/// An owner in a lease. Start from PAGODA_KV_LEASED_OWNER_INIT, which sets `struct_size`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_kv_leased_owner {
    /// The size of this struct.
    pub struct_size: u32,
    /// The number of cached tokens.
    pub cached: i32,
    /// The number of new tokens, which the model appends.
    pub tokens: i32,
    /// The number of tokens at the start of the request that were cached already and trimmed. Leave their rows out of
    /// the inputs of the model.
    pub trimmed: i32,
    /// The owner.
    pub owner: u64,
    /// The position of the first token of the history that the model uses.
    pub start: i64,
}

// SAFETY: numbers and pointers in C's layout, the size first.
unsafe impl Versioned for pagoda_kv_request {
    const FIRST_SIZE: usize = 48;
}

// SAFETY: as above.
unsafe impl Versioned for pagoda_kv_leased_owner {
    const FIRST_SIZE: usize = 32;
}

/// A lease until it ends. Calls that read it or wait for it share the lock; the call that ends it takes it exclusively.
pub(super) struct LeaseObject(RwLock<Option<KvLease>>);

impl Object for LeaseObject {
    type C = pagoda_kv_lease;
    const KIND: Kind = Kind::KvLease;

    fn table() -> &'static Table<Self> {
        static TABLE: Table<LeaseObject> = Table::new();
        &TABLE
    }
}

impl LeaseObject {
    /// Calls `body` with the lease, under the shared lock.
    fn with<T>(&self, body: impl FnOnce(&KvLease) -> Result<T>) -> Result<T> {
        let lease: RwLockReadGuard<'_, _> = self.0.read();
        body(lease.as_ref().ok_or_else(ended)?)
    }

    /// Takes the lease out, to end it.
    fn take(&self) -> Result<KvLease> {
        self.0.write().take().ok_or_else(ended)
    }
}

fn ended() -> Error {
    Error::invalid("lease", "this lease has ended already, by a commit or an abort: prepare another one")
}

/// Makes room for a batch, and returns a lease with the tensors for the model. Evicts the least recently used owners if
/// necessary, and loads those of the batch from the store. The owners of the batch stay in the pool until the lease
/// ends. Any number of leases may read a history at the same time; only one may append to it.
///
/// Then run the model on the tensors of the lease and the pools of the cache. Its rows are, for each owner, the new
/// tokens and then the candidates. A call that fails changes no history.
///
/// Ownership: the caller frees the lease. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a gap between the
/// cached history and the new tokens, an overlap, edited items, or an owner that occurs twice; CAPACITY if too few
/// pages are free or evictable, about `requests` if the whole pool is too small; BUSY if another lease appends to one
/// of the histories; IO.
///
/// # Safety
/// `requests` has `request_count` structs of the size that they say, each with as many items as it says; `lease` and
/// `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_kv_cache_prepare(
    cache: *const pagoda_kv_cache,
    requests: *const pagoda_kv_request,
    request_count: usize,
    lease: *mut *mut pagoda_kv_lease,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_kv_cache_prepare", error, || {
            let (cache, out) = (KvCache::get(cache, "cache")?, args::out(lease, "lease")?);
            let made = cache.prepare(&read_requests(requests, request_count)?)?;
            out.write(Arc::new(LeaseObject(RwLock::new(Some(made)))).insert()?);
            Ok(())
        })
    }
}

/// Gets an index tensor of a lease, an input of the model.
///
/// Ownership: the caller frees the tensor, before or after the lease. Threads: any. Errors: INVALID_HANDLE;
/// INVALID_ARGUMENT for a NULL, an unknown PAGODA_KV_TENSOR_... number, or a lease that has ended.
///
/// # Safety
/// `tensor` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_kv_lease_tensor(
    lease: *const pagoda_kv_lease,
    which: pagoda_kv_tensor,
    tensor: *mut *mut pagoda_tensor,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_kv_lease_tensor", error, || {
            let (lease, out) = (LeaseObject::get(lease, "lease")?, args::out(tensor, "tensor")?);
            let tensor = lease.with(|lease| index_tensor(lease, which).cloned())?;
            out.write(tensor.insert()?);
            Ok(())
        })
    }
}

/// Gets an owner of a lease, by its index in the batch.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL, an
/// invalid `struct_size`, an index out of range, or a lease that has ended.
///
/// # Safety
/// `owner` may be written to as far as its struct_size says, and `error`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_kv_lease_owner(
    lease: *const pagoda_kv_lease,
    index: usize,
    owner: *mut pagoda_kv_leased_owner,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_kv_lease_owner", error, || {
            let (lease, out) = (LeaseObject::get(lease, "lease")?, args::out_struct(owner, "owner")?);
            out.write(&lease.with(|lease| leased_owner(lease, index))?);
            Ok(())
        })
    }
}

/// Tells whether a layer of all owners was loaded from the store: `ready` receives 1 or 0. Does not wait.
///
/// Ownership: the caller keeps the lease. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL, a layer
/// out of range, or a lease that has ended; IO if a history could not be read. The lease is then unusable, and the next
/// one has less in the cache.
///
/// # Safety
/// `ready` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_kv_lease_ready(
    lease: *const pagoda_kv_lease,
    layer: i32,
    ready: *mut i32,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_kv_lease_ready", error, || {
            let (lease, out) = (LeaseObject::get(lease, "lease")?, args::out(ready, "ready")?);
            let layer = args::count(layer, "layer")?;
            out.write(lease.with(|lease| lease.ready(layer))?.into());
            Ok(())
        })
    }
}

/// Waits until a layer of all owners was loaded from the store; with `layer` -1, all layers. It is needed only if
/// `options.onload_in_background` is 1, before the model runs.
///
/// Ownership: the caller keeps the lease. Threads: any number at once on a lease. Errors: those of
/// pagoda_kv_lease_ready.
///
/// # Safety
/// `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_kv_lease_wait(
    lease: *const pagoda_kv_lease,
    layer: i32,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_kv_lease_wait", error, || {
            let lease = LeaseObject::get(lease, "lease")?;
            lease.with(|lease| match layer {
                -1 => lease.wait(None),
                layer => lease.wait(Some(args::count(layer, "layer")?)),
            })
        })
    }
}

/// Adds the new tokens, which the model has appended, to the histories, and ends the lease. The handle must still be
/// freed. With PAGODA_OFFLOAD_AT_COMMIT the histories are queued for the store when this returns; with `wait` 1 it
/// waits until they are durable.
///
/// Ownership: the caller keeps the handle. Threads: any; if two threads end a lease, the second one gets an error.
/// Errors: INVALID_HANDLE; INVALID_ARGUMENT for a lease that has ended; IO if a history could not be read from the
/// store, and then this was an abort. With `wait` 1 also CAPACITY or IO about "wait": the tokens are committed, but
/// they are not durable.
///
/// # Safety
/// `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_kv_lease_commit(
    lease: *const pagoda_kv_lease,
    wait: i32,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_kv_lease_commit", error, || {
            let (lease, wait) = (LeaseObject::get(lease, "lease")?, args::flag(wait, "wait")?);
            // Waits with the shared lock, as other calls may do at the same time; the exclusive lock is then free soon.
            // The commit returns the error, if there is one.
            let _ = lease.with(|lease| lease.wait(None));
            let written = lease.take()?.commit()?;
            if wait { written.wait().map_err(|error| error.about("wait")) } else { Ok(()) }
        })
    }
}

/// Ends a lease without a change of the histories. The handle must still be freed.
///
/// Ownership: the caller keeps the handle. Threads: any; waits for other threads that wait for this lease. Errors:
/// INVALID_HANDLE; INVALID_ARGUMENT for a lease that has ended.
///
/// # Safety
/// `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_kv_lease_abort(
    lease: *const pagoda_kv_lease,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_kv_lease_abort", error, || {
            LeaseObject::get(lease, "lease")?.take()?.abort();
            Ok(())
        })
    }
}

/// Frees a lease, and aborts it if it has not ended. NULL is allowed.
///
/// Ownership: takes the lease. Threads: any. Errors: INVALID_HANDLE, which is also logged.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_kv_lease_free(lease: *mut pagoda_kv_lease) -> pagoda_status {
    freeing("pagoda_kv_lease_free", || LeaseObject::remove(lease, "lease"))
}

/// # Safety
/// As for `pagoda_kv_cache_prepare`.
unsafe fn read_requests<'a>(requests: *const pagoda_kv_request, count: usize) -> Result<Vec<KvRequest<'a>>> {
    let defaults = pagoda_kv_request {
        struct_size: size_of::<pagoda_kv_request>() as u32,
        tokens: 0,
        candidates: 0,
        owner: 0,
        start: 0,
        items: std::ptr::null(),
        item_count: 0,
    };
    // SAFETY: by contract.
    let requests = unsafe { args::structs(requests, count, defaults, "requests", "request_count")? };
    let read = |(index, request): (usize, pagoda_kv_request)| {
        let name = format!("requests[{index}]");
        let negative = |_| Error::invalid(format!("{name}.start"), format!("{} is negative", request.start));
        Ok(KvRequest {
            owner: Owner(request.owner),
            start: u64::try_from(request.start).map_err(negative)?,
            tokens: args::count(request.tokens, &format!("{name}.tokens"))?,
            candidates: args::count(request.candidates, &format!("{name}.candidates"))?,
            // SAFETY: by contract.
            items: unsafe { args::items(request.items, request.item_count, &name)? },
            ..KvRequest::default()
        })
    };
    requests.into_iter().enumerate().map(read).collect()
}

fn index_tensor(lease: &KvLease, which: pagoda_kv_tensor) -> Result<&Arc<Tensor>> {
    match which {
        PAGODA_KV_TENSOR_ROW_OFFSETS => Ok(lease.row_offsets()),
        PAGODA_KV_TENSOR_NUM_CANDIDATES => Ok(lease.num_candidates()),
        PAGODA_KV_TENSOR_CACHED_LEN => Ok(lease.cached_len()),
        PAGODA_KV_TENSOR_PAGE_INDPTR => Ok(lease.page_indptr()),
        PAGODA_KV_TENSOR_PAGE_IDS => Ok(lease.page_ids()),
        other => Err(args::unknown("which", other, "PAGODA_KV_TENSOR_...")),
    }
}

fn leased_owner(lease: &KvLease, index: usize) -> Result<pagoda_kv_leased_owner> {
    let mut owners = lease.owners();
    let count = owners.len();
    let owner = owners
        .nth(index)
        .ok_or_else(|| Error::invalid("index", format!("{index} is beyond the {count} owners of this lease")))?;
    Ok(pagoda_kv_leased_owner {
        struct_size: size_of::<pagoda_kv_leased_owner>() as u32,
        // No history has more than i32::MAX tokens.
        cached: owner.cached as i32,
        tokens: owner.tokens as i32,
        trimmed: owner.trimmed as i32,
        owner: owner.owner.0,
        start: owner.start as i64,
    })
}
