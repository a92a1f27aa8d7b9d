import { render } from "preact";
import { App } from "./app";
import "uplot/dist/uPlot.min.css";
import "./style.css";

const root = document.getElementById("app");
if (root) render(<App />, root);
