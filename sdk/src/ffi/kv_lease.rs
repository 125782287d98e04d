//! `pagoda_kv_lease`: a batch's hold on its users' histories, from prepare to commit.

use std::sync::Arc;

use super::args::{self, Versioned};
use super::error::{pagoda_error, pagoda_status};
use super::handle::{Kind, Object, Table};
use super::kv::pagoda_kv_cache;
use super::tensor::pagoda_tensor;
use super::{boundary, freeing};
use crate::error::{Error, Result};
use crate::kv::{KvCache, Lease, Owner, Request};
use crate::sync::{RwLock, RwLockReadGuard};
use crate::tensor::Tensor;

/// Which of the index tensors of a lease: the inputs of ai.pagoda's operators of the same names.
pub type pagoda_kv_tensor = i32;

/// Where each user's rows begin: i32 [users + 1].
pub const PAGODA_KV_ROW_OFFSETS: pagoda_kv_tensor = 0;
/// How many candidates each user has: i32 [users].
pub const PAGODA_KV_NUM_CANDIDATES: pagoda_kv_tensor = 1;
/// How many tokens of each user are cached: i32 [users].
pub const PAGODA_KV_CACHED_LEN: pagoda_kv_tensor = 2;
/// Where each user's list of pages begins: i32 [users + 1].
pub const PAGODA_KV_PAGE_INDPTR: pagoda_kv_tensor = 3;
/// Each user's pages in order of position: i32.
pub const PAGODA_KV_PAGE_IDS: pagoda_kv_tensor = 4;

/// A batch's hold on its users: where their histories lie, and room for what is new. Ends with a commit or an abort.
pub struct pagoda_kv_lease {
    _private: [u8; 0],
}

/// What one user of a batch brings. Start from PAGODA_KV_REQUEST_INIT, which sets `struct_size`: in an array it is what
/// tells where the next element lies, so all elements must have the same.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_kv_request {
    /// The size of this struct.
    pub struct_size: u32,
    /// How many new tokens there are.
    pub tokens: i32,
    /// How many candidates follow them.
    pub candidates: i32,
    /// The user.
    pub user: u64,
    /// The position of the first new token in the user's history.
    pub start: i64,
    /// If the cache looks out for edited histories: the items of the history up to the last new token, of all new tokens
    /// at least, and of as many before them as are to be checked. Else NULL.
    pub items: *const u64,
    /// How many items there are.
    pub item_count: usize,
}

/// One user in a lease. Start from PAGODA_KV_LEASED_USER_INIT, which sets `struct_size`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_kv_leased_user {
    /// The size of this struct.
    pub struct_size: u32,
    /// How many of its tokens are cached.
    pub cached: i32,
    /// How many are new; the model appends them.
    pub tokens: i32,
    /// How many rows at the beginning of the request were cached already, where overlaps are trimmed: they must be left
    /// out of the model's rows.
    pub trimmed: i32,
    /// The user.
    pub user: u64,
    /// The position where the history begins, as the model sees it.
    pub start: i64,
}

// SAFETY: numbers and pointers in C's layout, the size first.
unsafe impl Versioned for pagoda_kv_request {
    const FIRST_SIZE: usize = 48;
}

// SAFETY: as above.
unsafe impl Versioned for pagoda_kv_leased_user {
    const FIRST_SIZE: usize = 32;
}

/// A lease until it ends. Whoever reads it or waits for it shares the lock; whoever ends it has it for a moment.
pub(super) struct LeaseObject(RwLock<Option<Lease>>);

impl Object for LeaseObject {
    type C = pagoda_kv_lease;
    const KIND: Kind = Kind::KvLease;

    fn table() -> &'static Table<Self> {
        static TABLE: Table<LeaseObject> = Table::new();
        &TABLE
    }
}

impl LeaseObject {
    /// Does something with the lease, beside others who do.
    fn with<T>(&self, body: impl FnOnce(&Lease) -> Result<T>) -> Result<T> {
        let lease: RwLockReadGuard<'_, _> = self.0.read();
        body(lease.as_ref().ok_or_else(ended)?)
    }

    /// Takes the lease out, to end it.
    fn take(&self) -> Result<Lease> {
        self.0.write().take().ok_or_else(ended)
    }
}

fn ended() -> Error {
    Error::invalid("lease", "this lease has ended already, by a commit or an abort: prepare another one")
}

/// Makes room for a batch and says where everything lies. Evicts the least recently used users if need be, and brings those
/// of the batch back from the store. The users of the batch stay where they are until the lease ends. Any number of
/// leases may read a user's history at the same time; one at most may add to it.
///
/// Then run the model on the tensors of the lease and the pools of the cache: for each user the rows of its new tokens,
/// then those of its candidates. A call that fails changes no history.
///
/// Ownership: the caller frees the lease. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT (a gap between the cached
/// history and the new tokens, an overlap, edited items, a user twice), CAPACITY if the pool has too few pages that no
/// lease holds, about `requests` if it would have too few without any, BUSY if another lease adds to one of the histories, IO.
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
            let batch = read_requests(requests, request_count)?;
            let made = cache.prepare(&batch).map_err(about_requests)?;
            out.write(Arc::new(LeaseObject(RwLock::new(Some(made)))).insert()?);
            Ok(())
        })
    }
}

/// One of the index tensors of a lease, to be an input of the model.
///
/// Ownership: the caller frees the tensor, before or after the lease. Threads: any. Errors: INVALID_HANDLE,
/// INVALID_ARGUMENT for a NULL, a number that is none of the PAGODA_KV_... tensors, or a lease that has ended.
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

/// What a lease has of one user, by its place in the batch.
///
/// Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT for a NULL, a small struct_size,
/// an index beyond the end, or a lease that has ended.
///
/// # Safety
/// `user` may be written to as far as its struct_size says, and `error`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_kv_lease_user(
    lease: *const pagoda_kv_lease,
    index: usize,
    user: *mut pagoda_kv_leased_user,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_kv_lease_user", error, || {
            let (lease, out) = (LeaseObject::get(lease, "lease")?, args::out_struct(user, "user")?);
            out.write(&lease.with(|lease| leased_user(lease, index))?);
            Ok(())
        })
    }
}

/// Whether a layer of every user has arrived from the store: `ready` gets 1 or 0. Does not wait.
///
/// Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT for a NULL, a layer that there is
/// not, or a lease that has ended; IO if something could not be read: the lease is of no use then, and the next one will
/// find less in the cache.
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
            out.write(lease.with(|lease| lease.layer_ready(layer))?.into());
            Ok(())
        })
    }
}

/// Waits until a layer of every user has arrived from the store; with `layer` -1 until all have. Needed before the model
/// runs only where `options.onload_in_background` is 1.
///
/// Ownership: takes nothing over. Threads: any number at once on one lease. Errors: as for pagoda_kv_lease_ready.
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
                -1 => lease.wait(),
                layer => lease.wait_layer(args::count(layer, "layer")?),
            })
        })
    }
}

/// Makes the new tokens part of their histories: the model has appended them. Ends the lease; the handle is still to be
/// freed. Where histories go to the store at commit, they are on their way when this returns; with `wait` 1 it waits until
/// they are as durable as the store promises.
///
/// Ownership: takes nothing over. Threads: any; of two that end one lease, the second is told so. Errors: INVALID_HANDLE;
/// INVALID_ARGUMENT for a lease that has ended; IO if something could not be read from the store, and then this was an
/// abort. With `wait` 1 also CAPACITY or IO about "wait": the tokens are committed, but the store does not have them as
/// it should.
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
            // Waited for beside others who do; after that, no one holds up whoever wants the lease for itself. What went
            // wrong the commit says.
            let _ = lease.with(Lease::wait);
            let written = lease.take()?.commit()?;
            if wait { written.wait().map_err(|error| error.about("wait")) } else { Ok(()) }
        })
    }
}

/// Ends a lease and leaves everything as it was before; the handle is still to be freed.
///
/// Ownership: takes nothing over. Threads: any; waits for other threads that wait for this lease. Errors: INVALID_HANDLE,
/// INVALID_ARGUMENT for a lease that has ended.
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

/// Frees a lease, and aborts it if it has not ended. NULL is fine.
///
/// Ownership: takes the lease over. Threads: any. Errors: PAGODA_INVALID_HANDLE, and a line in the log.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_kv_lease_free(lease: *mut pagoda_kv_lease) -> pagoda_status {
    freeing("pagoda_kv_lease_free", || LeaseObject::remove(lease, "lease"))
}

/// # Safety
/// As for `pagoda_kv_cache_prepare`.
unsafe fn read_requests<'a>(requests: *const pagoda_kv_request, count: usize) -> Result<Vec<Request<'a>>> {
    let defaults = pagoda_kv_request {
        struct_size: size_of::<pagoda_kv_request>() as u32,
        tokens: 0,
        candidates: 0,
        user: 0,
        start: 0,
        items: std::ptr::null(),
        item_count: 0,
    };
    // SAFETY: by contract.
    let requests = unsafe { args::structs(requests, count, defaults, "requests", "request_count")? };
    let read = |(index, request): (usize, pagoda_kv_request)| {
        let name = format!("requests[{index}]");
        let negative = |_| Error::invalid(format!("{name}.start"), format!("{} is negative", request.start));
        Ok(Request {
            owner: Owner(request.user),
            start: u64::try_from(request.start).map_err(negative)?,
            tokens: args::count(request.tokens, &format!("{name}.tokens"))?,
            candidates: args::count(request.candidates, &format!("{name}.candidates"))?,
            // SAFETY: by contract.
            items: unsafe { args::items(request.items, request.item_count, &name)? },
        })
    };
    requests.into_iter().enumerate().map(read).collect()
}

/// What the cache says of a batch, in the names of the header.
fn about_requests(error: Error) -> Error {
    match error.argument().and_then(|argument| argument.strip_prefix("batch")) {
        Some(rest) => {
            let named = format!("requests{rest}");
            error.about(named)
        }
        None => error,
    }
}

fn index_tensor(lease: &Lease, which: pagoda_kv_tensor) -> Result<&Arc<Tensor>> {
    match which {
        PAGODA_KV_ROW_OFFSETS => Ok(lease.row_offsets()),
        PAGODA_KV_NUM_CANDIDATES => Ok(lease.num_candidates()),
        PAGODA_KV_CACHED_LEN => Ok(lease.cached_len()),
        PAGODA_KV_PAGE_INDPTR => Ok(lease.page_indptr()),
        PAGODA_KV_PAGE_IDS => Ok(lease.page_ids()),
        other => Err(args::unknown("which", other, "PAGODA_KV_...")),
    }
}

fn leased_user(lease: &Lease, index: usize) -> Result<pagoda_kv_leased_user> {
    let mut users = lease.owners();
    let count = users.len();
    let user = users
        .nth(index)
        .ok_or_else(|| Error::invalid("index", format!("{index} is beyond the {count} users of this lease")))?;
    Ok(pagoda_kv_leased_user {
        struct_size: size_of::<pagoda_kv_leased_user>() as u32,
        // No history has more than i32::MAX tokens.
        cached: user.cached as i32,
        tokens: user.tokens as i32,
        trimmed: user.trimmed as i32,
        user: user.owner.0,
        start: user.start as i64,
    })
}
