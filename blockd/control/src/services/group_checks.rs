//! Checks of a call that makes a volume group known.

use std::path::PathBuf;

use blockd_media::error::{Error, shown};

use super::groups::Group;

/// Refuses a group that is known with another folder.
pub(super) fn refuse_other_folder(known: &Group, folder: Option<PathBuf>) -> Result<(), Error> {
    if known.folder() == folder {
        return Ok(());
    }
    let text = |path: Option<PathBuf>| {
        path.map_or_else(|| "none".to_owned(), |path| path.display().to_string())
    };
    Err(Error::Exists {
        what: "volume group",
        name: shown(&known.name),
        field: "folder".to_owned(),
        existing: text(known.folder()),
        asked: text(folder),
    })
}

/// Refuses a group that is known with another number of this daemon.
pub(super) fn refuse_other_host(known: &Group, asked: u32) -> Result<(), Error> {
    let existing = known.host();
    if asked == 0 || asked == u32::from(existing.0) {
        return Ok(());
    }
    Err(Error::Exists {
        what: "volume group",
        name: shown(&known.name),
        field: "host".to_owned(),
        existing: existing.to_string(),
        asked: asked.to_string(),
    })
}

/// Checks this daemon's number in a folder.
pub(super) fn checked_host(host: u32, is_folder: bool) -> Result<u16, Error> {
    if host != 0 && !is_folder {
        let allowed = "left out without a folder: LVM has the number (local/host_id)";
        return Err(Error::invalid("host", host, allowed));
    }
    match u16::try_from(host.max(1)) {
        // As many as sanlock has.
        Ok(host) if host <= 2000 => Ok(host),
        _ => Err(Error::invalid("host", host, "from 1 to 2000")),
    }
}

/// Checks the name of a group, and gives its folder.
pub(super) fn checked_group(name: &str, folder: &str) -> Result<Option<PathBuf>, Error> {
    // Names of volume groups by lvm(8).
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"+_.-".contains(&byte);
    let is_name = (1..=63).contains(&name.len()) && name.bytes().all(is_plain);
    if !is_name || name.starts_with(['-', '.']) {
        let allowed = "1 to 63 letters, digits, '+', '_', '.' and '-', none of the last two first";
        return Err(Error::invalid("name", name, allowed));
    }
    if folder.is_empty() {
        return Ok(None);
    }
    let path = PathBuf::from(folder);
    if !path.is_absolute() || folder.contains('\0') {
        return Err(Error::invalid("folder", folder, "an absolute path"));
    }
    if !path.is_dir() {
        return Err(Error::not_found("folder", folder));
    }
    Ok(Some(path))
}
