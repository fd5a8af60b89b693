//! The paths that a scan reads.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use blockd_media::error::Error;

/// The files and disks that are meant, each once, in order. A link counts as what it leads to.
pub(super) fn expanded(wanted: &[PathBuf]) -> Result<Vec<PathBuf>, Error> {
    let mut all = Vec::new();
    for path in wanted {
        match fs::metadata(path) {
            Ok(found) if found.is_dir() => all.extend(in_folder(path, |_| true)?),
            Ok(_) => all.push(path.clone()),
            Err(_) if is_pattern(path) => {
                let (folder, pattern) = parts(path);
                all.extend(in_folder(&folder, |name| matches(pattern.as_bytes(), name))?);
            }
            Err(error) => return Err(Error::file("cannot open", path, error)),
        }
    }
    let mut seen = BTreeSet::new();
    all.retain(|path| seen.insert(path.canonicalize().unwrap_or_else(|_| path.clone())));
    Ok(all)
}

fn is_pattern(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().contains(['*', '?']))
}

fn parts(path: &Path) -> (PathBuf, String) {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    (folder.unwrap_or_else(|| Path::new(".")).to_owned(), name.unwrap_or_default())
}

/// Files and disks in a directory whose names are wanted.
fn in_folder(folder: &Path, wanted: impl Fn(&[u8]) -> bool) -> Result<Vec<PathBuf>, Error> {
    let failed = |error| Error::file("read", folder, error);
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let is_wanted = wanted(entry.file_name().as_encoded_bytes());
        // A link that leads to nothing is no file.
        let kind = fs::metadata(entry.path()).map(|found| found.file_type());
        if is_wanted && kind.is_ok_and(|kind| kind.is_file() || kind.is_block_device()) {
            paths.push(entry.path());
        }
    }
    paths.sort();
    Ok(paths)
}

/// Whether a name is what a pattern describes: `*` is any text, `?` any one byte.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    match pattern.split_first() {
        None => name.is_empty(),
        Some((b'*', rest)) => (0..=name.len()).any(|at| matches(rest, &name[at..])),
        Some((b'?', rest)) => !name.is_empty() && matches(rest, &name[1..]),
        Some((byte, rest)) => name.first() == Some(byte) && matches(rest, &name[1..]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_names() {
        let cases = [
            ("*.pool", "a.pool", true),
            ("*.pool", "a.pools", false),
            ("sd?", "sdb", true),
            ("sd?", "sd", false),
            ("a*b*c", "a-b-b-c", true),
            ("*", "", true),
        ];
        for (pattern, name, expected) in cases {
            let found = matches(pattern.as_bytes(), name.as_bytes());
            assert_eq!(found, expected, "{pattern} {name}");
        }
    }
}
