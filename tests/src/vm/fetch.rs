//! Kernels and programs from Debian's package manager, unpacked below the build folder and never
//! installed.
//!
//! The older one is a package of the machine's own release. The newer one is in a newer suite of
//! the same archive: package lists of that suite alone are kept in a folder of ours, made from the
//! machine's own sources, so that neither an address nor a key is known here and nothing of the
//! machine's configuration changes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use blockd_testkit::tools;

use super::kernel::{Which, numbers};

/// The unsigned form is the one that holds the kernel.
const OLDER: &str = r"^linux-image-6\.12\..*-cloud-amd64-unsigned$";

/// Newer kernels come in parts. This is the one with the image; its name has the release.
const NEWER: &str = r"^linux-binary-[0-9].*-cloud-amd64$";
const NEWER_START: &str = "linux-binary-";

/// The parts of a newer kernel, followed by its release: image, modules, and lists of what is
/// built in.
const PARTS: [&str; 3] = [NEWER_START, "linux-modules-", "linux-base-"];

/// Where newer kernels are looked for, the calmer place first.
const SUITES: [&str; 2] = ["testing", "unstable"];

/// Sources that hold no suites of this name: they go with one release.
const NO_SUITES: [&str; 3] = ["-security", "-updates", "-backports"];

/// Fetches the newest kernel of a line into a folder of its own below the cache.
pub(super) fn fetch(which: Which, cache: &Path) -> Result<()> {
    for tool in ["apt-get", "apt-cache", "dpkg-deb", "depmod", "xz"] {
        tools::find(tool)?;
    }
    match which {
        Which::Older => older(cache),
        Which::Newer => newer(cache),
    }
}

fn older(cache: &Path) -> Result<()> {
    let here = Manager::default();
    let package = match here.newest(OLDER)? {
        Some(package) => package,
        None => {
            // A fresh machine has no list of packages yet.
            tools::output(here.get().arg("update"))?;
            here.newest(OLDER)?.with_context(|| format!("no package matches {OLDER}"))?
        }
    };
    unpack(&here, &[package], cache)
}

fn newer(cache: &Path) -> Result<()> {
    anywhere("a kernel", |archive, suite| newer_from(archive, suite, cache))
}

/// Asks every archive of the machine for every newer suite, until one has what is wanted.
fn anywhere(wanted: &str, ask: impl Fn(&Archive, &str) -> Result<()>) -> Result<()> {
    let mut reasons = Vec::new();
    for suite in SUITES {
        for archive in archives()? {
            match ask(&archive, suite) {
                Ok(()) => return Ok(()),
                Err(error) => reasons.push(format!("suite {suite}: {error:#}")),
            }
        }
    }
    bail!("no newer suite of the machine's archive has {wanted}:\n{}", reasons.join("\n"))
}

fn newer_from(archive: &Archive, suite: &str, cache: &Path) -> Result<()> {
    let there = Manager::of(archive, suite, &cache.join(format!("apt-{suite}")))?;
    tools::output(there.get().arg("update"))?;
    let newest = there.newest(NEWER)?.with_context(|| format!("no package matches {NEWER}"))?;
    let release = newest.strip_prefix(NEWER_START).unwrap_or_default();
    if !Which::Newer.is(release) {
        bail!("its newest kernel is {release}");
    }
    unpack(&there, &PARTS.map(|part| format!("{part}{release}")), cache)
}

/// Downloads the packages of a kernel and unpacks them into one folder, named after the first.
fn unpack(manager: &Manager, packages: &[String], cache: &Path) -> Result<()> {
    let root = cache.join(&packages[0]);
    manager.unpack(packages, &root)?;
    let release = release(&root).with_context(|| format!("{packages:?} hold no kernel"))?;
    // depmod looks below lib/modules only.
    let merged = root.join("usr/lib/modules");
    let base = if merged.exists() { root.join("usr") } else { root.clone() };
    tools::output(Command::new("depmod").arg("--basedir").arg(&base).arg(&release))?;
    // Written last: without it the folder is half done.
    fs::write(root.join("complete"), &release)?;
    Ok(())
}

/// Unpacks packages of programs, with the libraries that they need, into a folder: those of the
/// machine's own release, or beside the newer kernel those of a newer suite, with its C library.
pub(super) fn programs(which: Which, names: &[&str], cache: &Path, root: &Path) -> Result<()> {
    match which {
        Which::Older => {
            let here = Manager::default();
            if here.with_libraries(names, cache).is_err() {
                // A fresh machine has no list of packages yet.
                tools::output(here.get().arg("update"))?;
            }
            here.unpack(&here.with_libraries(names, cache)?, root)
        }
        Which::Newer => anywhere("packages", |archive, suite| {
            let there = Manager::of(archive, suite, &cache.join(format!("apt-{suite}")))?;
            tools::output(there.get().arg("update"))?;
            there.unpack(&there.with_libraries(names, cache)?, root)
        }),
    }
}

/// The release of an unpacked kernel, which is the name of its folder of modules.
fn release(root: &Path) -> Option<String> {
    let folders = ["usr/lib/modules", "lib/modules"].map(|folder| root.join(folder));
    let entries = folders.iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).next()
}

/// An archive in the configuration of the machine's package manager.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Archive {
    uri: String,
    /// The keys that sign it, if the configuration names them for this archive.
    signed_by: Option<String>,
}

/// The machine's archives that have suites, each once, in the order of its configuration.
fn archives() -> Result<Vec<Archive>> {
    let here = Manager::default();
    let ask = || {
        let mut command = here.get();
        command.args(["indextargets", "--format"]);
        tools::text(command.arg("$(RELEASE) $(COMPONENT) $(REPO_URI) $(SIGNED_BY)"))
    };
    let mut found = archives_of(&ask()?);
    if found.is_empty() {
        // The package manager lists no archive before its first update.
        tools::output(here.get().arg("update"))?;
        found = archives_of(&ask()?);
    }
    ensure!(!found.is_empty(), "the package manager knows no archive");
    Ok(found)
}

fn archives_of(text: &str) -> Vec<Archive> {
    let mut archives = Vec::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let (Some(release), Some("main"), Some(uri)) = (words.next(), words.next(), words.next())
        else {
            continue;
        };
        // A placeholder without a value is printed unchanged.
        let signed_by = words.next().filter(|word| word.starts_with('/')).map(ToOwned::to_owned);
        let archive = Archive { uri: uri.to_owned(), signed_by };
        let suites = !NO_SUITES.iter().any(|end| release.ends_with(end));
        if suites && !archives.contains(&archive) {
            archives.push(archive);
        }
    }
    archives
}

/// The package manager, with the machine's sources or with others.
#[derive(Debug, Default)]
struct Manager {
    options: Vec<String>,
}

impl Manager {
    /// One suite of one archive and nothing else; what it learns is kept in this folder.
    fn of(archive: &Archive, suite: &str, folder: &Path) -> Result<Self> {
        let parts = folder.join("sources");
        for path in [&folder.join("lists/partial"), &folder.join("cache/archives/partial"), &parts]
        {
            fs::create_dir_all(path)?;
        }
        let keys =
            archive.signed_by.as_ref().map_or(String::new(), |keys| format!("Signed-By: {keys}\n"));
        let uri = &archive.uri;
        let source = format!("Types: deb\nURIs: {uri}\nSuites: {suite}\nComponents: main\n{keys}");
        fs::write(parts.join("suite.sources"), source)?;
        let path = |path: PathBuf| path.to_string_lossy().into_owned();
        let options = [
            format!("Dir::State={}", path(folder.to_path_buf())),
            format!("Dir::State::lists={}", path(folder.join("lists"))),
            format!("Dir::Cache={}", path(folder.join("cache"))),
            format!("Dir::Etc::sourceparts={}", path(parts)),
            "Dir::Etc::sourcelist=/dev/null".to_owned(),
            // The list of packages is enough.
            "Acquire::Languages=none".to_owned(),
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".to_owned(),
        ];
        Ok(Self { options: options.iter().flat_map(|word| ["-o".into(), word.clone()]).collect() })
    }

    fn get(&self) -> Command {
        let mut command = Command::new("apt-get");
        command.args(&self.options).arg("-q");
        command
    }

    /// Packages with the libraries that they need, directly or not, as if nothing were
    /// installed.
    fn with_libraries(&self, names: &[&str], cache: &Path) -> Result<Vec<String>> {
        let empty = cache.join("nothing-installed");
        fs::write(&empty, "")?;
        let mut command = self.get();
        command.arg("-o").arg(format!("Dir::State::status={}", empty.display()));
        command.args(["-qq", "--no-install-recommends", "--print-uris", "install"]).args(names);
        let said = tools::text(&mut command)?;
        let all = said.lines().filter_map(|line| line.split_whitespace().nth(1)?.split('_').next());
        // Perl is for scripts that set a package up.
        let wanted =
            |name: &&str| names.contains(name) || name.starts_with("lib") && !name.contains("perl");
        Ok(all.filter(wanted).map(ToOwned::to_owned).collect())
    }

    /// Downloads packages and unpacks them into an empty folder.
    fn unpack(&self, packages: &[String], root: &Path) -> Result<()> {
        let _ = fs::remove_dir_all(root);
        fs::create_dir_all(root)?;
        eprintln!("fetching {}", packages.join(" "));
        tools::output(self.get().arg("download").args(packages).current_dir(root))?;
        let mut files = Vec::new();
        for entry in fs::read_dir(root)? {
            files.push(entry?.path());
        }
        files.retain(|path| path.extension().is_some_and(|extension| extension == "deb"));
        for file in &files {
            tools::output(Command::new("dpkg-deb").arg("--extract").arg(file).arg(root))?;
            fs::remove_file(file)?;
        }
        Ok(())
    }

    /// The newest package of a pattern.
    fn newest(&self, pattern: &str) -> Result<Option<String>> {
        let mut command = Command::new("apt-cache");
        command.args(&self.options).args(["search", "--names-only", pattern]);
        let found = tools::text(&mut command)?;
        let mut names: Vec<&str> =
            found.lines().filter_map(|line| line.split_once(" - ")).map(|(name, _)| name).collect();
        names.sort_by_key(|name| numbers(name));
        Ok(names.pop().map(ToOwned::to_owned))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archives_with_suites_are_taken_once_with_their_keys() {
        let text = "stable main http://one/debian/ $(SIGNED_BY)\n\
                    stable contrib http://one/debian/ $(SIGNED_BY)\n\
                    stable-updates main http://one/debian/ $(SIGNED_BY)\n\
                    stable-security main http://one/security/ $(SIGNED_BY)\n\
                    stable main http://one/debian/ $(SIGNED_BY)\n\
                    stable main http://two/debian/ /usr/share/keyrings/two.gpg\n";
        let two = Some("/usr/share/keyrings/two.gpg".to_owned());
        assert_eq!(
            archives_of(text),
            [
                Archive { uri: "http://one/debian/".to_owned(), signed_by: None },
                Archive { uri: "http://two/debian/".to_owned(), signed_by: two },
            ]
        );
    }

    #[test]
    fn a_manager_of_another_suite_leaves_the_machine_s_own_sources_alone() {
        let folder = std::env::temp_dir().join(format!("blockd-apt-{}", std::process::id()));
        let archive = Archive { uri: "file:/nowhere/".to_owned(), signed_by: None };
        let manager = Manager::of(&archive, "testing", &folder).unwrap();
        let mut asked = Command::new("apt-get");
        asked.args(&manager.options).args(["update", "--print-uris"]);
        let said = tools::text(&mut asked);
        fs::remove_dir_all(&folder).unwrap();
        let said = said.unwrap();
        let wanted = "'file:/nowhere/dists/testing/";
        let other = said.lines().find(|line| !line.starts_with(wanted));
        assert!(!said.is_empty() && other.is_none(), "{said}");
    }
}
