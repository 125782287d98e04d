//! A way for the tests to make any function panic. It is not in release builds.

/// Panics if the environment variable `PAGODA_TEST_PANIC` names `function`.
#[cfg(debug_assertions)]
pub(super) fn trip(function: &str) {
    if std::env::var("PAGODA_TEST_PANIC").is_ok_and(|name| name == function) {
        panic!("forced by PAGODA_TEST_PANIC in {function}");
    }
}

/// Nothing, in a release build.
#[cfg(not(debug_assertions))]
pub(super) fn trip(_function: &str) {}
