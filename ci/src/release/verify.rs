//! Checks of the published files by other means than those that made them: the packages against the
//! archive, and the bill of materials against the sources that the programs themselves name.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{PROGRAMS, Release, SOURCES};
use crate::command;
use crate::package::memchr;
use crate::steps::Outcome;

/// Unpacks everything below `folder` and compares it.
///
/// # Errors
/// The first difference.
pub(super) fn run(release: &Release, root: &Path, folder: &Path) -> Result<Outcome> {
    sums(&release.dist)?;
    let _ = fs::remove_dir_all(folder);
    let (installed, unpacked) = (folder.join("installed"), folder.join("unpacked"));
    fs::create_dir_all(&installed)?;
    fs::create_dir_all(&unpacked)?;
    for entry in fs::read_dir(&release.dist)? {
        let file = entry?.path();
        if file.extension().is_some_and(|extension| extension == "deb") {
            command::output(Command::new("dpkg-deb").arg("--extract").arg(&file).arg(&installed))?;
        }
    }
    let mut tar = Command::new("tar");
    tar.arg("--extract").arg("--file").arg(release.dist.join(release.archive_name()));
    command::output(tar.arg("--directory").arg(&unpacked).arg("--strip-components=1"))?;
    let files = same(&installed, &unpacked)?;
    let bill = fs::read_to_string(release.dist.join(release.bill_name()))?;
    let listed = listed(&serde_json::from_str(&bill).context("the bill of materials")?)?;
    let mut named = BTreeSet::new();
    for name in PROGRAMS {
        let program = unpacked.join("usr/bin").join(name);
        release.check(name, &program)?;
        let symbols = command::output(Command::new("objdump").arg("--syms").arg(&program))?;
        ensure!(symbols.contains("no symbols"), "{name} is not stripped");
        let bytes = fs::read(&program)?;
        let home = root.display().to_string();
        ensure!(memchr(&bytes, home.as_bytes()).next().is_none(), "{name} has {home} in it");
        named.extend(sources(&bytes));
    }
    ensure!(!named.is_empty(), "the programs name no sources: with what were they built?");
    let missing: Vec<&str> = named.difference(&listed).map(String::as_str).collect();
    ensure!(missing.is_empty(), "not in the bill of materials: {}", missing.join(", "));
    println!(
        "release: {files} files of the packages are in the archive; the programs name {} packages, \
         all of them in the bill of materials",
        named.len()
    );
    fs::remove_dir_all(folder)?;
    Ok(Outcome::Passed)
}

/// Checks each file by its sum, and that each has one.
fn sums(dist: &Path) -> Result<()> {
    let mut check = Command::new("sha256sum");
    check.current_dir(dist).args(["--check", "--strict", "--quiet", "sha256sums"]);
    command::output(&mut check)?;
    let text = fs::read_to_string(dist.join("sha256sums"))?;
    for entry in fs::read_dir(dist)? {
        let name = entry?.file_name().into_string().ok().context("a name")?;
        let is_it = |line: &str| line.split_once("  ").is_some_and(|(_, file)| file == name);
        ensure!(name == "sha256sums" || text.lines().any(is_it), "{name} has no checksum");
    }
    Ok(())
}

/// Compares the files of the packages with those of the archive, which has the configuration
/// elsewhere, and returns their number.
fn same(installed: &Path, unpacked: &Path) -> Result<usize> {
    let mut find = Command::new("find");
    let found = command::output(find.current_dir(installed).args([".", "-type", "f"]))?;
    for file in found.lines() {
        let other = match file {
            "./etc/blockd/blockd.toml" => "usr/share/doc/blockd/blockd.toml",
            file => file,
        };
        let read = |path: &Path| fs::read(path).with_context(|| path.display().to_string());
        ensure!(
            read(&installed.join(file))? == read(&unpacked.join(other))?,
            "{file} of the package is another one in the archive"
        );
        if file.ends_with(".gz") {
            command::output(Command::new("gzip").arg("--test").arg(unpacked.join(other)))?;
        }
    }
    Ok(found.lines().count())
}

/// The packages that a bill of materials lists, as `name-version`.
fn listed(bill: &Value) -> Result<BTreeSet<String>> {
    ensure!(bill["bomFormat"] == "CycloneDX", "the bill of materials has no format");
    let components = bill["components"].as_array().context("a bill without components")?;
    let name = |component: &Value| {
        Some(format!("{}-{}", component["name"].as_str()?, component["version"].as_str()?))
    };
    components
        .iter()
        .map(|component| name(component).with_context(|| format!("a nameless {component}")))
        .collect()
}

/// The packages of the registry whose sources a program names, for its panics, as `name-version`.
fn sources(program: &[u8]) -> BTreeSet<String> {
    let begin = format!("{SOURCES}/registry/src/");
    let packages = memchr(program, begin.as_bytes()).filter_map(|at| {
        let mut parts = program[at..].split(|byte| *byte == b'/');
        // The first is the name of the registry.
        str::from_utf8(parts.nth(1)?).ok().map(str::to_owned)
    });
    packages.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn packages_are_found_by_the_sources_that_a_program_names() {
        let program = b"\0/cargo/registry/src/index.example-1a/bytes-1.2.3/src/lib.rs\xff/blockd/x.rs\
                        /cargo/registry/src/index.example-1a/a-b-0.1.0+c/src/d.rs/cargo/registry/src/";
        let found: Vec<String> = sources(program).into_iter().collect();
        assert_eq!(found, ["a-b-0.1.0+c", "bytes-1.2.3"]);
    }

    #[test]
    fn a_bill_lists_names_and_versions() {
        let bill = |components| json!({ "bomFormat": "CycloneDX", "components": components });
        let one = json!([{ "name": "bytes", "version": "1.2.3" }]);
        assert_eq!(listed(&bill(one)).unwrap().first().unwrap(), "bytes-1.2.3");
        assert!(listed(&bill(json!([{ "name": "bytes" }]))).is_err());
        assert!(listed(&json!({ "components": [] })).is_err());
    }

    #[test]
    fn a_file_without_checksum_is_found() {
        let dist = std::env::temp_dir().join(format!("ci-release-{}", std::process::id()));
        fs::create_dir_all(&dist).unwrap();
        fs::write(dist.join("one"), "1").unwrap();
        let sum = "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b";
        fs::write(dist.join("sha256sums"), format!("{sum}  one\n")).unwrap();
        sums(&dist).unwrap();
        fs::write(dist.join("two"), "2").unwrap();
        assert_eq!(sums(&dist).unwrap_err().to_string(), "two has no checksum");
        fs::remove_file(dist.join("two")).unwrap();
        fs::write(dist.join("one"), "2").unwrap();
        assert!(sums(&dist).is_err());
        fs::remove_dir_all(&dist).unwrap();
    }
}
