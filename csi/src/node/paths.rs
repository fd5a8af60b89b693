//! Paths that clients name: inside kubelet's folder, whatever links lie on the way.

use std::fs::File;
use std::io;
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};

/// Bytes of a path: the kernel's limit, without the NUL.
pub const LONGEST_BYTES: usize = 4095;

/// Why a path is not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The path has the wrong form; the accepted one.
    Form(&'static str),
    /// The path is not below the kubelet's folder, which is this.
    Outside(PathBuf),
    /// A link lies on its way.
    Link,
}

/// Checks a path without a change, and returns it in the form of the mount table: kubelet's folder
/// may itself be a link, paths in it may not.
///
/// # Errors
/// Why it is refused; or when it can't be found out.
pub fn check(kubelet: &Path, path: &str) -> io::Result<Result<PathBuf, Refused>> {
    let rest = match below(kubelet, path) {
        Ok(rest) => rest,
        Err(refused) => return Ok(Err(refused)),
    };
    let real = kubelet.canonicalize()?;
    let folder = File::open(&real)?;
    let within = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS;
    let how = OpenHow::new().flags(OFlag::O_PATH | OFlag::O_CLOEXEC).resolve(within);
    // The existing part of the path. This driver creates everything below it.
    for part in rest.ancestors().filter(|part| !part.as_os_str().is_empty()) {
        match openat2(&folder, part, how) {
            Ok(_) => return Ok(Ok(real.join(rest))),
            Err(Errno::ENOENT) => {}
            Err(Errno::ELOOP | Errno::EXDEV) => return Ok(Err(Refused::Link)),
            Err(Errno::ENOTDIR) => {
                return Ok(Err(Refused::Form("a folder on each step of the way")));
            }
            Err(Errno::ENAMETOOLONG) => {
                return Ok(Err(Refused::Form("names of at most 255 bytes")));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Ok(real.join(rest)))
}

/// Returns the part of a path below the kubelet's folder, without a look at the file system.
fn below(kubelet: &Path, path: &str) -> Result<PathBuf, Refused> {
    if path.len() > LONGEST_BYTES {
        return Err(Refused::Form("at most 4095 bytes"));
    }
    if path.bytes().any(|byte| byte == 0) {
        return Err(Refused::Form("no NUL"));
    }
    let path = Path::new(path);
    if !path.is_absolute() {
        return Err(Refused::Form("an absolute path"));
    }
    if path.components().any(|part| part == Component::ParentDir) {
        return Err(Refused::Form("no '..'"));
    }
    match path.strip_prefix(kubelet) {
        // Rebuilt from its parts: the mount table has no doubled slashes and no dots.
        Ok(rest) if rest.components().next().is_some() => Ok(rest.components().collect()),
        _ => Err(Refused::Outside(kubelet.to_path_buf())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    struct Kubelet(PathBuf);

    impl Kubelet {
        fn new(name: &str) -> Self {
            let folder =
                std::env::temp_dir().join(format!("csi-paths-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&folder);
            fs::create_dir_all(folder.join("kubelet/pods/a")).unwrap();
            fs::create_dir_all(folder.join("elsewhere")).unwrap();
            Self(folder.canonicalize().unwrap())
        }

        fn check(&self, rest: &str) -> Result<PathBuf, Refused> {
            let kubelet = self.0.join("kubelet");
            check(&kubelet, &format!("{}/{rest}", kubelet.display())).unwrap()
        }
    }

    impl Drop for Kubelet {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn existing_and_new_paths_are_accepted() {
        let kubelet = Kubelet::new("taken");
        let real = kubelet.0.join("kubelet");
        assert_eq!(kubelet.check("pods/a"), Ok(real.join("pods/a")));
        assert_eq!(kubelet.check("pods//a/./"), Ok(real.join("pods/a")));
        assert_eq!(kubelet.check("pods/b/c/mount"), Ok(real.join("pods/b/c/mount")));
    }

    #[test]
    fn a_path_that_leads_out_is_refused() {
        let kubelet = Kubelet::new("out");
        assert_eq!(kubelet.check("pods/../../elsewhere"), Err(Refused::Form("no '..'")));
        assert!(matches!(kubelet.check(""), Err(Refused::Outside(_))));
        assert!(matches!(kubelet.check("."), Err(Refused::Outside(_))));
        for path in ["/etc", "/var/lib/kubeletx/pods", "/"] {
            let refused = check(Path::new("/var/lib/kubelet"), path).unwrap();
            assert_eq!(refused, Err(Refused::Outside("/var/lib/kubelet".into())));
        }
        let refused = check(Path::new("/var/lib/kubelet"), "pods/a").unwrap();
        assert_eq!(refused, Err(Refused::Form("an absolute path")));
    }

    #[test]
    fn a_link_is_refused_wherever_it_leads_and_lies() {
        let kubelet = Kubelet::new("links");
        let pods = kubelet.0.join("kubelet/pods");
        symlink(kubelet.0.join("elsewhere"), pods.join("out")).unwrap();
        symlink("a", pods.join("in")).unwrap();
        symlink("../../elsewhere", pods.join("up")).unwrap();
        symlink("nowhere", pods.join("broken")).unwrap();
        for name in ["out", "in", "up", "broken", "out/x", "in/x", "up/x", "broken/x"] {
            assert_eq!(kubelet.check(&format!("pods/{name}")), Err(Refused::Link), "{name}");
        }
        assert!(!kubelet.0.join("elsewhere/x").exists());
    }

    #[test]
    fn the_folder_itself_may_be_reached_by_a_link() {
        let kubelet = Kubelet::new("moved");
        let link = kubelet.0.join("link");
        symlink(kubelet.0.join("kubelet"), &link).unwrap();
        let taken = check(&link, &format!("{}/pods/a", link.display())).unwrap();
        assert_eq!(taken, Ok(kubelet.0.join("kubelet/pods/a")));
    }

    #[test]
    fn a_path_is_no_longer_than_the_kernel_takes() {
        let kubelet = Kubelet::new("long");
        assert!(matches!(kubelet.check(&"x/".repeat(3000)), Err(Refused::Form(_))));
        assert!(matches!(kubelet.check("a\0b"), Err(Refused::Form("no NUL"))));
        fs::write(kubelet.0.join("kubelet/pods/file"), "").unwrap();
        assert!(matches!(kubelet.check("pods/file/x"), Err(Refused::Form(_))));
        assert!(kubelet.check("pods/file").is_ok());
    }
}
