//! How many files the process may have open: each connection is one.

use std::io;

/// What models, stores and libraries have open, beside connections.
const OTHERS: u64 = 512;

/// Raises the limit of the process to what so many connections need, as far as the system allows. By default it is 1024 in most
/// systems: the connection after the last file would also keep a store from opening its next one.
pub fn allow_files(connections: u32) {
    let wanted = u64::from(connections) + OTHERS;
    match raise(wanted) {
        Ok(allowed) if allowed >= wanted => {}
        Ok(allowed) => log::warn!(
            "the system allows {allowed} open files, which may be too few for the {connections} connections of limits.connections: \
             lower it, or raise LimitNOFILE of the unit or `ulimit -n`"
        ),
        Err(error) => log::warn!("the limit of open files can not be read or raised: {error}"),
    }
}

/// The limit after it was raised.
fn raise(wanted: u64) -> io::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: it writes into the struct.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    if limit.rlim_cur < wanted {
        limit.rlim_cur = wanted.min(limit.rlim_max);
        // SAFETY: it reads the struct.
        if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(limit.rlim_cur)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_raised_and_never_lowered() {
        let before = raise(0).unwrap();
        assert_eq!(raise(before).unwrap(), before);
        let more = raise(before + 1).unwrap();
        assert!(more == before || more == before + 1);
        assert_eq!(raise(1).unwrap(), more);
    }
}
