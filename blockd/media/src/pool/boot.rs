//! Which boot of the host this is.

use super::PoolError;

/// The kernel's name for this boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The kernel's name for this boot of the host.
pub fn boot_id() -> Result<[u8; 16], PoolError> {
    let text = std::fs::read_to_string(BOOT_ID).map_err(PoolError::io("read", BOOT_ID))?;
    let hex: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let id = u128::from_str_radix(&hex, 16);
    id.map(u128::to_be_bytes)
        .map_err(|error| PoolError::io("read", BOOT_ID)(std::io::Error::other(error.to_string())))
}
