//! `cargo ci release`: all that is published of a version. The programs are linked with all of
//! their libraries, so that one file runs on every distribution, whatever its C library.

mod bill;
mod old;
mod verify;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::steps::{Outcome, Steps};
use crate::{command, package, setup};

/// The programs, which are also the names of their packages.
pub(crate) const PROGRAMS: [&str; 2] = ["blockd", "blockd-csi"];

/// The folder that a program's sources of other packages have in its panics.
const SOURCES: &str = "/cargo";

/// The programs that build and pack, beside cargo.
const TOOLS: [setup::Tool; 6] = [
    setup::LIBCLANG,
    setup::Tool { program: "dpkg-deb", package: "dpkg" },
    setup::Tool { program: "objdump", package: "binutils" },
    setup::Tool { program: "tar", package: "tar" },
    setup::Tool { program: "gzip", package: "gzip" },
    setup::Tool { program: "sha256sum", package: "coreutils" },
];

/// Documents in the archive. The last is the licence of the C library, which asks for a copy of it.
const DOCUMENTS: [&str; 6] = [
    "README.md",
    "CHANGELOG.md",
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "docs/OPERATIONS.md",
    "/usr/share/common-licenses/LGPL-2.1",
];

/// The facts that all steps share.
#[derive(Debug)]
struct Release {
    /// The target that the programs are built for, as cargo names it.
    target: String,
    /// The last commit, in short. `-modified` is added when files differ from it.
    commit: String,
    /// The time of all files.
    epoch: u64,
    /// Where the programs are built.
    binaries: PathBuf,
    /// Where the published files go.
    dist: PathBuf,
}

/// Builds unless that is done, packs, describes and tries; true when all held.
pub(crate) fn run(root: &Path, built: bool, json: Option<&Path>) -> bool {
    let mut steps = Steps::new();
    let mut found = None;
    steps.run("tools, commit, time", || {
        setup::ensure(&TOOLS)?;
        found = Some(Release::new(root)?);
        Ok(Outcome::Passed)
    });
    let Some(release) = found else { return steps.finish() };
    let mut is_sound = false;
    steps.run("programs without libraries", || {
        if !built {
            release.build(root)?;
        }
        for name in PROGRAMS {
            release.check(name, &release.binaries.join(name))?;
        }
        is_sound = true;
        Ok(Outcome::Passed)
    });
    // All that follows is made of them.
    if !is_sound {
        return steps.finish();
    }
    steps.run("packages", || release.packages(root));
    steps.run("archive", || release.archive(root));
    steps.run("bill of materials", || {
        let bill = bill::bill(root, &release.target, release.epoch)?;
        fs::write(release.dist.join(release.bill_name()), format!("{bill:#}\n"))?;
        Ok(Outcome::Passed)
    });
    steps.run("checksums", || release.checksums(json));
    steps.run("published files", || {
        verify::run(&release, root, &release.dist.with_file_name("release-verify"))
    });
    steps.run("an older Debian", || old::run(&release.dist, &release.archive_name()));
    steps.finish()
}

impl Release {
    fn new(root: &Path) -> Result<Self> {
        let rustc = command::output(Command::new("rustc").current_dir(root).arg("-vV"))?;
        let target = rustc.lines().find_map(|line| line.strip_prefix("host: "));
        let target = target.context("rustc names no host")?.to_owned();
        ensure!(target.ends_with("-linux-gnu"), "releases are made on Linux with glibc: {target}");
        let git =
            |words: &[&str]| command::output(Command::new("git").current_dir(root).args(words));
        let mut commit = git(&["rev-parse", "--short=9", "HEAD"])?.trim().to_owned();
        if !git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty() {
            commit.push_str("-modified");
        }
        let folder = command::target_dir(root);
        let release = Self {
            commit,
            epoch: package::epoch(root)?,
            binaries: folder.join(&target).join("release"),
            dist: folder.join("dist"),
            target,
        };
        println!("release: {} of commit {}", release.name(), release.commit);
        let _ = fs::remove_dir_all(&release.dist);
        fs::create_dir_all(&release.dist)?;
        Ok(release)
    }

    /// The beginning of the names of published files.
    fn name(&self) -> String {
        let architecture = self.target.split('-').next().unwrap_or_default();
        format!("blockd-{}-{architecture}-linux", env!("CARGO_PKG_VERSION"))
    }

    fn archive_name(&self) -> String {
        format!("{}.tar.gz", self.name())
    }

    fn bill_name(&self) -> String {
        format!("{}.cdx.json", self.name())
    }

    /// Builds the programs with the C library in them.
    fn build(&self, root: &Path) -> Result<()> {
        let mut cargo = command::cargo(root);
        cargo.args(["build", "--release", "--locked", "--target", &self.target]);
        cargo.args(PROGRAMS.iter().flat_map(|name| ["--package", name]));
        // The names of folders on this machine are not part of what is published.
        let home = std::env::var("CARGO_HOME")
            .or_else(|_| std::env::var("HOME").map(|home| format!("{home}/.cargo")))?;
        let flags = [
            "-Ctarget-feature=+crt-static".to_owned(),
            format!("--remap-path-prefix={}=/blockd", root.display()),
            format!("--remap-path-prefix={home}={SOURCES}"),
        ];
        cargo.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"));
        // Packing strips it.
        cargo.env("CARGO_PROFILE_RELEASE_DEBUG", "0");
        command::run(cargo.env("BLOCKD_COMMIT", &self.commit))
    }

    /// Checks that a program needs no library and names the version and the commit.
    fn check(&self, name: &str, program: &Path) -> Result<()> {
        let needed = package::needed(program)?;
        ensure!(needed.is_empty(), "{name} needs {}", needed.join(", "));
        let version = command::output(Command::new(program).arg("--version"))?;
        let expected = format!("{name} {} ({})", env!("CARGO_PKG_VERSION"), self.commit);
        ensure!(version.trim() == expected, "{version} in place of {expected}");
        Ok(())
    }

    fn packages(&self, root: &Path) -> Result<Outcome> {
        for file in package::packages(root, &self.binaries, &self.packed(root), None)? {
            fs::copy(&file, self.dist.join(file.file_name().context("a name")?))?;
        }
        Ok(Outcome::Passed)
    }

    /// Where packages and their files are made.
    fn packed(&self, root: &Path) -> PathBuf {
        command::target_dir(root).join("release-package")
    }

    /// An archive of the files of both packages, below a folder with the version in its name. The
    /// configuration is an example in there: to unpack a newer archive must not change one in use.
    ///
    /// The archive has no entries for folders. tar would replace a link of the same name by the
    /// folder, and `/lib` is a link on most systems.
    fn archive(&self, root: &Path) -> Result<Outcome> {
        let packed = self.packed(root);
        let tree = packed.join(self.name());
        for name in PROGRAMS {
            fs::create_dir_all(&tree)?;
            let mut copy = Command::new("cp");
            copy.args(["--archive", "--no-target-directory"]).arg(packed.join(name));
            command::output(copy.arg(&tree))?;
        }
        fs::remove_dir_all(tree.join("DEBIAN"))?;
        let documents = tree.join("usr/share/doc/blockd");
        fs::rename(tree.join("etc/blockd/blockd.toml"), documents.join("blockd.toml"))?;
        fs::remove_dir_all(tree.join("etc"))?;
        for document in DOCUMENTS {
            let name = Path::new(document).file_name().context("a name")?;
            fs::copy(root.join(document), documents.join(name))?;
        }
        let mut find = Command::new("find");
        find.current_dir(&packed).args([&self.name(), "-type", "f"]);
        let found = command::output(&mut find)?;
        let mut files: Vec<&str> = found.lines().collect();
        files.sort_unstable();
        let mut tar = Command::new("tar");
        tar.current_dir(&packed).args(["--create", "--format=gnu", "--mode=go=rX,u+rw"]);
        tar.args(["--owner=0", "--group=0", "--numeric-owner"]);
        tar.args([format!("--mtime=@{}", self.epoch).as_str(), "--use-compress-program=gzip -9n"]);
        tar.arg("--file").arg(self.dist.join(self.archive_name()));
        command::output(tar.args(files))?;
        Ok(Outcome::Passed)
    }

    /// Writes `sha256sums`, which `sha256sum --check` takes, and the list of all files.
    fn checksums(&self, json: Option<&Path>) -> Result<Outcome> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.dist)? {
            names.push(entry?.file_name());
        }
        names.sort();
        let mut sums = Command::new("sha256sum");
        let sums = command::output(sums.current_dir(&self.dist).args(&names))?;
        fs::write(self.dist.join("sha256sums"), &sums)?;
        let mut files = Vec::new();
        for line in sums.lines() {
            let (sum, name) = line.split_once("  ").context("a line of sha256sum")?;
            let bytes = fs::metadata(self.dist.join(name))?.len();
            println!("release: {sum}  {name} ({} KiB)", bytes / 1024);
            files.push(json!({ "name": name, "bytes": bytes, "sha256": sum }));
        }
        if let Some(path) = json {
            let version = env!("CARGO_PKG_VERSION");
            let all = json!({
                "version": version, "commit": self.commit, "target": self.target,
                "epoch": self.epoch, "folder": self.dist, "files": files,
            });
            fs::write(path, format!("{all:#}\n")).with_context(|| path.display().to_string())?;
        }
        println!("release: in {}", self.dist.display());
        Ok(Outcome::Passed)
    }
}
