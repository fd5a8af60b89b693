//! Which names and paths are allowed.

use std::path::Path;

use blockd_mapper::format::VolumeName;

/// Bytes that the path of a Unix socket may have: `sun_path` less the closing zero.
pub const MAX_SOCKET_PATH: usize = 107;

/// The label of a volume with the time of its newest snapshot that another host has, in
/// milliseconds since 1970: set by `blockd replicate`, and shown by the daemon's metrics.
pub const REPLICATED_LABEL: &str = "blockd.io/replicated-unix-ms";

/// Whether a pool or volume may have this name; the error is what is allowed. Volumes of older
/// versions may have names that a new one can't get: see [`check_new_name`].
pub fn check_name(name: &str) -> Result<(), String> {
    match VolumeName::new(name) {
        Ok(_) => Ok(()),
        Err(_) => Err(NAME_FORM.to_owned()),
    }
}

/// Whether a new pool or volume may get this name. Characters that can't be seen, or that turn the
/// text around them, make two names look the same.
pub fn check_new_name(name: &str) -> Result<(), String> {
    check_name(name)?;
    if name.contains(is_hidden) {
        return Err(NEW_NAME_FORM.to_owned());
    }
    Ok(())
}

const NEW_NAME_FORM: &str = "without characters that are invisible or change the direction of text";

/// Whether a character can't be seen, or changes the look of its neighbours: control characters,
/// marks and overrides of the direction of text, separators of lines, and spaces of no width.
#[must_use]
pub fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{00ad}'
                | '\u{034f}'
                | '\u{061c}'
                | '\u{115f}'..='\u{1160}'
                | '\u{180e}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e007f}'
        )
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_name_looks_like_itself() {
        for name in ["data", "données", "データ", "a b", "data-1_x.y", "🦀"] {
            assert_eq!(check_new_name(name), Ok(()), "{name}");
        }
        for c in ['\u{200b}', '\u{200e}', '\u{202e}', '\u{2066}', '\u{feff}'] {
            let name = format!("da{c}ta");
            assert_eq!(check_new_name(&name), Err(NEW_NAME_FORM.to_owned()), "{name:?}");
        }
        for c in ['\n', '\u{7f}', '\u{85}'] {
            assert_eq!(check_new_name(&format!("da{c}ta")), Err(NAME_FORM.to_owned()), "{c:?}");
        }
        // Volumes that have such a name can still be reached, to be deleted.
        assert_eq!(check_name("da\u{202e}ta"), Ok(()));
        assert!(check_new_name("a/b").unwrap_err().starts_with("1 to 128 bytes"));
    }
}
