//! Runs the scripts of the commands with a `kubectl` that changes nothing.

use std::process::Command;

/// Answers `get` by variables of the environment, and prints the words of all that would change
/// something.
const KUBECTL: &str = r#"
kubectl() {
    case "$*" in
        *nodeAffinity*) printf %s "$NODE" ;;
        "get pvc "*) printf %s "$CLAIM" ;;
        "get pv "*) [ "$PV" != error ] || return 1; printf %s "$PV" ;;
        "get node "*) printf %s "$READY" ;;
        "get pods "*) printf %s "$CLAIMS" ;;
        *) echo "$*" ;;
    esac
}
"#;

/// The changes of a script, a line each, or the text of its failure.
pub(crate) fn changes(script: &str, answers: &[(&str, &str)]) -> Result<Vec<String>, String> {
    let mut command = Command::new("sh");
    for name in ["NODE", "CLAIM", "PV", "READY", "CLAIMS"] {
        command.env(name, "");
    }
    command.envs(answers.iter().copied()).arg("-c").arg(format!("{KUBECTL}{script}"));
    let output = command.output().unwrap();
    let (said, failed) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if !output.status.success() {
        assert_eq!(said, "", "changes before a failure");
        return Err(failed.into_owned());
    }
    Ok(said.lines().map(str::to_owned).collect())
}
