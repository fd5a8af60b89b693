//! Which names and paths are allowed.

use std::path::Path;

use blockd_mapper::format::VolumeName;

/// Bytes that the path of a Unix socket may have: `sun_path` less the closing zero.
pub const MAX_SOCKET_PATH: usize = 107;

/// Whether a pool or volume may have this name; the error is what is allowed.
pub fn check_name(name: &str) -> Result<(), String> {
    match VolumeName::new(name) {
        Ok(_) => Ok(()),
        Err(_) => Err(NAME_FORM.to_owned()),
    }
}

const NAME_FORM: &str = "1 to 128 bytes without '/' and control characters, not \".\" or \"..\", \
                         and not begin with \"node-\"";

/// Whether a Unix socket may have this path; the error is what is allowed.
pub fn check_socket_path(path: &Path) -> Result<(), String> {
    let len = path.as_os_str().len();
    if len <= MAX_SOCKET_PATH {
        return Ok(());
    }
    Err(format!("at most {MAX_SOCKET_PATH} bytes, the limit of Unix sockets; it has {len}"))
}
