//! Asks before a disk is erased.

use std::io::{BufRead, Write};

use anyhow::{Context, Result, ensure};

use super::disk::Disk;

/// Asks for the name of the disk, since a `y` is typed too easily.
///
/// # Errors
/// When something else is typed.
pub fn ask(disk: &Disk, input: &mut impl BufRead, output: &mut impl Write) -> Result<()> {
    let path = disk.path.display().to_string();
    write!(output, "\nEverything on {path} will be lost. Type {path} to go on: ")?;
    output.flush()?;
    let mut line = String::new();
    input.read_line(&mut line).context("reading the answer")?;
    ensure!(line.trim() == path, "not confirmed: nothing was written");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(text: &str) -> Result<()> {
        let disk = Disk {
            path: "/dev/sdx".into(),
            name: "sdx".to_owned(),
            bytes: 1 << 30,
            model: "model".to_owned(),
            partitions: Vec::new(),
            uses: Vec::new(),
        };
        ask(&disk, &mut text.as_bytes(), &mut Vec::new())
    }

    #[test]
    fn only_the_name_confirms() {
        answer("/dev/sdx\n").unwrap();
        for text in ["", "\n", "y\n", "yes\n", "/dev/sd\n", "/dev/sdx1\n"] {
            assert!(answer(text).is_err(), "{text:?}");
        }
    }
}
