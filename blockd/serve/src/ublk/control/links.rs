//! Stable names: `/dev/blockd/POOL/NAME` leads to `/dev/ublkbN`. They are a convenience: a failure
//! is a warning.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Where the names are.
#[derive(Clone, Debug)]
pub(super) struct Links(pub(super) PathBuf);

impl Default for Links {
    fn default() -> Self {
        Self(PathBuf::from("/dev/blockd"))
    }
}

impl Links {
    fn path(&self, pool: &str, volume: &str) -> PathBuf {
        self.0.join(pool).join(volume)
    }

    /// Makes or replaces a name.
    pub(super) fn set(&self, pool: &str, volume: &str, device: &Path) {
        let path = self.path(pool, volume);
        let made = fs::create_dir_all(self.0.join(pool)).and_then(|()| {
            match fs::read_link(&path) {
                Ok(target) if target == device => return Ok(()),
                Ok(_) => fs::remove_file(&path)?,
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
            symlink(device, &path)
        });
        if let Err(error) = made {
            tracing::warn!(%error, path = %path.display(), "the device's name was not made");
        }
    }

    /// Takes a name away, and its folder with the last one.
    pub(super) fn remove(&self, pool: &str, volume: &str) {
        let path = self.path(pool, volume);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                tracing::warn!(%error, path = %path.display(), "the device's name stays");
            }
            _ => {}
        }
        // One that others are in stays.
        let _ = fs::remove_dir(self.0.join(pool));
    }

    /// Takes away names that lead to a ublk device which is not there, or is one of `own` under
    /// another name.
    pub(super) fn clean(&self, own: &[(u32, &str, &str)]) {
        for pool in fs::read_dir(&self.0).into_iter().flatten().flatten() {
            for link in fs::read_dir(pool.path()).into_iter().flatten().flatten() {
                let path = link.path();
                let Ok(target) = fs::read_link(&path) else { continue };
                let number = target.to_str().and_then(|text| text.strip_prefix("/dev/ublkb"));
                let Some(number) = number.and_then(|text| text.parse::<u32>().ok()) else {
                    continue;
                };
                let of_ours = own.iter().find(|(device, _, _)| *device == number);
                let is_right =
                    of_ours.is_some_and(|(_, pool, volume)| path == self.path(pool, volume));
                if !is_right && (of_ours.is_some() || !target.exists()) {
                    let _ = fs::remove_file(&path);
                }
            }
            let _ = fs::remove_dir(pool.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_go_and_stale_ones_are_cleaned() {
        let root = std::env::temp_dir().join(format!("blockd-links-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let links = Links(root.join("blockd"));
        links.set("p", "a", Path::new("/dev/ublkb900"));
        links.set("p", "a", Path::new("/dev/ublkb901"));
        assert_eq!(fs::read_link(root.join("blockd/p/a")).unwrap(), Path::new("/dev/ublkb901"));
        links.set("p", "old", Path::new("/dev/ublkb902"));
        links.set("q", "other", Path::new("/dev/null"));
        links.clean(&[(901, "p", "a")]);
        assert!(fs::read_link(root.join("blockd/p/a")).is_ok());
        assert!(fs::read_link(root.join("blockd/p/old")).is_err());
        assert!(fs::read_link(root.join("blockd/q/other")).is_ok());
        links.remove("p", "a");
        links.remove("p", "a");
        assert!(!root.join("blockd/p").exists());
        fs::remove_dir_all(root).unwrap();
    }
}
