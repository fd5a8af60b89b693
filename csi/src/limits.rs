//! Limits of fields in requests, and of characters in names. Checked before any other use of a
//! field.

use std::collections::HashMap;

use crate::error::Error;

/// Bytes of a string: the general limit of the specification.
pub const MAX_STRING: usize = 128;

/// Characters of the name of a new volume or snapshot, whatever their bytes: callers count either
/// way.
pub const MAX_NAME: usize = 128;

/// Bytes of a map, keys and values together: the general limit of the specification.
pub const MAX_MAP: usize = 4096;

/// Bytes of a path: the limit of the operating system, as the specification requires.
pub const MAX_PATH: usize = 4096;

/// Bytes of all mount flags together: the limit of the specification.
pub const MAX_FLAGS: usize = 4096;

/// Capabilities of one volume. There are 4 modes and 4 ways to use a volume; a list that is longer
/// repeats itself.
pub const MAX_CAPABILITIES: usize = 64;

/// Topologies of a requirement: one for each node of the largest clusters there are.
pub const MAX_TOPOLOGIES: usize = 16_384;

/// A string that may be empty.
///
/// # Errors
/// The field is too long.
pub fn string(field: &str, value: &str) -> Result<(), Error> {
    if value.len() > MAX_STRING {
        return Err(too_long(field, value.len(), MAX_STRING));
    }
    Ok(())
}

/// A string that has to be there.
///
/// # Errors
/// The field is empty, or too long.
pub fn required(field: &str, value: &str) -> Result<(), Error> {
    if value.is_empty() {
        return Err(Error::missing(field));
    }
    string(field, value)
}

/// The name of a new volume or snapshot.
///
/// # Errors
/// The field is empty, too long, or has a character that the specification forbids.
pub fn name(field: &str, value: &str) -> Result<(), Error> {
    if value.is_empty() {
        return Err(Error::missing(field));
    }
    let len = value.chars().count();
    if len > MAX_NAME {
        let allowed = format_args!("at most {MAX_NAME} characters");
        return Err(Error::invalid(field, format_args!("{len} characters long"), allowed));
    }
    if value.chars().any(is_banned) {
        return Err(Error::invalid(
            field,
            value,
            "without control characters other than tab and the ends of lines",
        ));
    }
    Ok(())
}

/// Control characters but tab, line feed and carriage return.
const fn is_banned(c: char) -> bool {
    matches!(
        c,
        '\0'..='\u{8}' | '\u{b}' | '\u{c}' | '\u{e}'..='\u{1f}' | '\u{7f}'..='\u{9f}'
    )
}

/// A map that may be empty.
///
/// # Errors
/// The field is too long.
pub fn map(field: &str, map: &HashMap<String, String>) -> Result<(), Error> {
    let bytes = map.iter().map(|(key, value)| key.len().saturating_add(value.len()));
    let bytes = bytes.fold(0, usize::saturating_add);
    if bytes > MAX_MAP {
        return Err(too_long(field, bytes, MAX_MAP));
    }
    Ok(())
}

/// A path that has to be there: absolute, and without `.` and `..`. Whether it is below a certain
/// folder is for the caller to see.
///
/// # Errors
/// The path is empty, too long, relative, or has a `..`.
pub fn path(field: &str, value: &str) -> Result<(), Error> {
    any_path(field, value)?;
    let goes_up = value.split('/').any(|part| part == ".." || part == ".");
    if !value.starts_with('/') || goes_up || value.contains('\0') {
        return Err(Error::invalid(field, value, "an absolute path without \"..\""));
    }
    Ok(())
}

/// A path that has to be there, and may lead to nowhere.
///
/// # Errors
/// The field is empty, or too long.
pub fn any_path(field: &str, value: &str) -> Result<(), Error> {
    if value.is_empty() {
        return Err(Error::missing(field));
    }
    if value.len() > MAX_PATH {
        return Err(too_long(field, value.len(), MAX_PATH));
    }
    Ok(())
}

/// A list that may be empty.
///
/// # Errors
/// The field is too long.
pub fn list(field: &str, len: usize, limit: usize) -> Result<(), Error> {
    if len > limit {
        let allowed = format!("at most {limit} entries");
        return Err(Error::invalid(field, format_args!("{len} entries long"), allowed));
    }
    Ok(())
}

fn too_long(field: &str, len: usize, limit: usize) -> Error {
    Error::invalid(field, format_args!("{len} bytes long"), format_args!("at most {limit} bytes"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop_assert_eq, proptest};
    use tonic::Code;

    use super::*;

    #[test]
    fn a_string_of_a_mebibyte_is_refused_by_field_and_length() {
        let long = "a".repeat(1 << 20);
        for error in [
            string("volume_id", &long).unwrap_err(),
            required("volume_id", &long).unwrap_err(),
            name("volume_id", &long).unwrap_err(),
            path("volume_id", &format!("/{long}")).unwrap_err(),
            map("volume_id", &HashMap::from([(long.clone(), String::new())])).unwrap_err(),
        ] {
            assert_eq!(error.code(), Code::InvalidArgument);
            assert!(error.to_string().starts_with("volume_id is 1048"), "{error}");
        }
    }

    #[test]
    fn fields_of_exactly_the_allowed_length_are_accepted() {
        let string_of = |bytes: usize| "ä".repeat(bytes / 2);
        assert!(string("name", &string_of(MAX_STRING)).is_ok());
        assert!(string("name", &(string_of(MAX_STRING) + "a")).is_err());
        for one in ["a", "ä", "漢", "🦀"] {
            assert!(name("name", &one.repeat(MAX_NAME)).is_ok());
            assert!(name("name", &one.repeat(MAX_NAME + 1)).is_err());
        }
        let path_of = |bytes: usize| format!("/{}", "a".repeat(bytes - 1));
        assert!(path("path", &path_of(MAX_PATH)).is_ok());
        assert!(path("path", &path_of(MAX_PATH + 1)).is_err());
        let map_of = |bytes: usize| HashMap::from([("k".to_owned(), "v".repeat(bytes - 1))]);
        assert!(map("parameters", &map_of(MAX_MAP)).is_ok());
        assert!(map("parameters", &map_of(MAX_MAP + 1)).is_err());
        assert!(list("list", 4, 4).is_ok() && list("list", 5, 4).is_err());
    }

    #[test]
    fn empty_fields_are_missing() {
        for error in [required("a", ""), name("a", ""), path("a", "")] {
            let error = error.unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument);
            assert_eq!(error.to_string(), "a is missing");
        }
    }

    #[test]
    fn paths_go_neither_up_nor_from_where_we_are() {
        for wrong in ["a", "./a", "/a/../b", "/..", "/a/..", "/a/./b", "/a\0b", "..", "~/a"] {
            assert_eq!(path("p", wrong).unwrap_err().code(), Code::InvalidArgument, "{wrong}");
        }
        for right in ["/", "/a", "/a/", "/a//b", "/a/..b/c..", "/a b/ä"] {
            assert!(path("p", right).is_ok(), "{right}");
        }
    }

    proptest! {
        #[test]
        fn names_have_any_character_but_those_that_are_banned(c: char) {
            let code = u32::from(c);
            let banned = matches!(code, 0..=8 | 0xb | 0xc | 0xe..=0x1f | 0x7f..=0x9f);
            prop_assert_eq!(name("name", &c.to_string()).is_err(), banned);
        }
    }
}
