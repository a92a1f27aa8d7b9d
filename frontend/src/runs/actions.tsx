// Rename, tag, put away and delete a run: only where the viewer was started with --manage, and never without asking.

import { useState } from "preact/hooks";
import { change } from "../api";
import { Dialog } from "../dialog";
import type { RunLine } from "../types";

type Action = "rename" | "tag" | "delete";

export function Actions({ run, done }: { run: RunLine; done: () => void }) {
  const [asked, setAsked] = useState<Action | null>(null);
  const [text, setText] = useState("");
  const [error, setError] = useState<string | null>(null);
  const folder = run.name.split("/").pop() ?? run.name;
  const start = (action: Action) => () => {
    setAsked(action);
    setError(null);
    setText(action === "rename" ? folder : action === "tag" ? run.tags.join(", ") : "");
  };
  const act = async (action: string, value: unknown) => {
    try {
      await change(run.name, action, value);
      setAsked(null);
      done();
    } catch (trouble) {
      setError(trouble instanceof Error ? trouble.message : String(trouble));
    }
  };
  const confirm = () => void (asked === "tag" ? act("tag", text.split(",")) : asked === "rename" ? act("rename", text.trim()) : act("delete", text));
  const written = run.status === "recording";
  return (
    <>
      <span class="actions">
        <button onClick={start("tag")}>tag</button>
        <button onClick={() => void act("archive", !run.archived)}>{run.archived ? "unarchive" : "archive"}</button>
        <button disabled={written} onClick={start("rename")}>rename</button>
        <button disabled={written} onClick={start("delete")}>delete</button>
      </span>
      {asked && (
        <Dialog title={asked === "delete" ? `Delete ${run.name}?` : asked === "rename" ? `Rename ${run.name}` : `Tags of ${run.name}`} close={() => setAsked(null)}>
          {asked === "delete" && <p>The folder and everything recorded in it are deleted from the disk. Write <code>{folder}</code> to confirm.</p>}
          {asked === "tag" && <p class="quiet">Words with commas between them.</p>}
          <form onSubmit={(e) => { e.preventDefault(); confirm(); }}>
            <input aria-label={asked === "tag" ? "Tags" : "Name"} value={text} onInput={(e) => setText(e.currentTarget.value)} autofocus />
            {error && <p class="alarm" role="alert">{error}</p>}
            <p class="buttons">
              <button type="submit" class={asked === "delete" ? "grave" : ""} disabled={asked === "delete" && text !== folder}>{asked === "delete" ? "Delete" : "Save"}</button>
              <button type="button" onClick={() => setAsked(null)}>Cancel</button>
            </p>
          </form>
        </Dialog>
      )}
    </>
  );
}
