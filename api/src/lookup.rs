//! Names of hosts in programs that the C library is part of, as in those of a release.

/// Restricts the lookup of host names to `/etc/hosts` and DNS where the C library is part of the
/// program. To be called before there are threads; elsewhere there is nothing to do.
///
/// Any other source that the system's `/etc/nsswitch.conf` names is a library. It would load the
/// system's own C library, of whatever version, beside the one of the program, which aborts then.
pub fn restrict() {
    #[cfg(all(target_env = "gnu", target_feature = "crt-static"))]
    {
        use std::ffi::{c_char, c_int};

        unsafe extern "C" {
            fn __nss_configure_lookup(database: *const c_char, sources: *const c_char) -> c_int;
        }
        // Fails for sources that cannot be parsed, and for lack of memory.
        // SAFETY: both arguments are strings that end with zero and live for ever; the library has
        // no other user yet, as there are no threads. No safe code has this call.
        let failed = unsafe { __nss_configure_lookup(c"hosts".as_ptr(), c"files dns".as_ptr()) };
        assert_eq!(failed, 0, "the lookup of host names can't be restricted");
    }
}
